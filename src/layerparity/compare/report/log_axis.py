"""Log axis: errors upwards in decades, with lanes of their own for zero and for NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.compare.report.columns import LEFT, Columns
from layerparity.compare.report.svg import tag, text

TOP = 34.0
_PLOT = 250.0
_LANE = 34.0


@dataclass(frozen=True)
class Axis:
    """Vertical scale: decades from ``low`` to ``high``, a lane for zero and one for NaN."""

    low: int
    high: int
    zero: bool
    broken: bool

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """Fit whole decades, two or more, to the positive finite values."""
        found = [math.log10(value) for value in values if 0 < value < math.inf]
        low = math.floor(min(found)) if found else -8
        high = max(math.ceil(max(found)) if found else 0, low + 2)
        broken = any(not math.isfinite(value) for value in values)
        return cls(low, high, 0.0 in values, broken)

    @property
    def top(self) -> float:
        """Where the decades begin, under the lane of what is not finite."""
        return TOP + (_LANE if self.broken else 0)

    @property
    def bottom(self) -> float:
        """Where the figure's frame ends, under the lane of exact zeros."""
        return self.top + _PLOT + (_LANE if self.zero else 0)

    def y(self, value: float) -> float:
        """Return the height of a value in pixels from the top."""
        if value == 0:
            return self.top + _PLOT + _LANE / 2
        if not math.isfinite(value):
            return TOP + _LANE / 2
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.top + _PLOT * (1 - share)


def grid(columns: Columns, axis: Axis, label: str) -> str:
    """Draw the lines and numbers of the scale, and what it measures."""
    right = columns.right
    every = 1 if axis.high - axis.low <= 8 else 2
    parts = [_lane(axis, right, math.nan, "NaN or ∞")] if axis.broken else []
    parts += [_lane(axis, right, 0.0, "exactly 0")] if axis.zero else []
    for exponent in range(axis.low, axis.high + 1, every):
        y = axis.y(10.0**exponent)
        parts.append(tag("path", class_="grid", d=f"M{LEFT:.1f} {y:.1f}H{right:.1f}"))
        parts.append(text(LEFT - 10, y + 4, f"1e{exponent}", text_anchor="end"))
    parts.append(text(LEFT - 10, TOP - 14, label, class_="axis", text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _lane(axis: Axis, right: float, value: float, words: str) -> str:
    y = axis.y(value)
    height = _LANE - 16
    drawn = tag("rect", class_="lane", x=LEFT, y=y - height / 2, width=right - LEFT, height=height)
    return drawn + text(LEFT - 10, y + 4, words, text_anchor="end")
