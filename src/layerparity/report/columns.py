"""Lay out the columns that all figures share, so that a layer has one place in all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.record.verdict import Outcome
from layerparity.report.stages import Stage, first_wrong
from layerparity.report.svg import hover, tag, text

LEFT = 112.0
_RIGHT = 92.0
_WIDEST = 1000.0
_PITCH = (11.0, 80.0)
_STRIP = 14.0
AXIS = 62.0
_SIGNS = {
    Outcome.PASS: "M-2.5 0h5",
    Outcome.FAIL: "M-3-3l6 6m0-6l-6 6",
    Outcome.INCONCLUSIVE: "M-3 2.5l3-5l3 5z",
    Outcome.MISSING: "M-2.5-2.5h5v5h-5z",
    Outcome.SKIPPED: "M0 0h.1",
}


@dataclass(frozen=True)
class Columns:
    """A column of ``pitch`` pixels for each stage, in forward order, from ``LEFT`` on."""

    stages: Sequence[Stage]

    @property
    def pitch(self) -> float:
        """Width of one column in pixels."""
        room = (_WIDEST - LEFT - _RIGHT) / max(len(self.stages), 1)
        return min(max(room, _PITCH[0]), _PITCH[1])

    @property
    def right(self) -> float:
        """Where the last column ends."""
        return LEFT + self.pitch * len(self.stages)

    @property
    def width(self) -> float:
        """Width of a whole figure, margins included."""
        return max(self.right + _RIGHT, 330.0)

    def left(self, index: int) -> float:
        """Where a column begins."""
        return LEFT + self.pitch * index

    def centre(self, index: int) -> float:
        """Middle of a column."""
        return self.left(index) + self.pitch / 2

    def axis(self, y: float) -> str:
        """Draw what stands under the columns (``AXIS`` pixels): outcomes, labels and a title."""
        signs = []
        for index, stage in enumerate(self.stages):
            # Outcomes differ in shape as well as in colour.
            words = hover(f"{stage.name}: {stage.outcome.value}")
            at = f"translate({self.centre(index):.1f} {y + _STRIP / 2:.1f})"
            sign = tag("path", words, class_=stage.outcome.value, d=_SIGNS[stage.outcome])
            signs.append(tag("g", sign, transform=at))
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * self.pitch >= 20 or n == 100)
        labels = [
            self._label(index, y + _STRIP)
            for index, stage in enumerate(self.stages)
            if stage.layer is None or stage.layer % every == 0
        ]
        middle = (LEFT + self.right) / 2
        title = text(middle, y + AXIS - 10, "layer", class_="axis", text_anchor="middle")
        return tag("g", *signs, class_="signs") + tag("g", *labels, title, class_="ticks")

    def first_failure(self, y: float, height: float) -> str:
        """Mark the first failing column with a line and a word; nothing where none fails."""
        index = self.failing
        if index is None:
            return ""
        x = self.centre(index)
        late = x > self.width - 130
        words = text(
            x - 7 if late else x + 7,
            y - 5,
            "first failure",
            class_="mark",
            text_anchor="end" if late else "start",
        )
        arrow = tag("path", class_="markhead", d=f"M{x - 4.5:.1f} {y - 13:.1f}h9l-4.5 8z")
        line = tag("path", class_="markline", d=f"M{x:.1f} {y - 4:.1f}V{y + height:.1f}")
        return tag("g", hover(f"first failure: {self.stages[index].name}"), line, arrow, words)

    @property
    def failing(self) -> int | None:
        """Index of the column of the first wrong place, or None where nothing fails."""
        first = first_wrong(self.stages)
        return next((i for i, each in enumerate(self.stages) if each is first), None)

    def _label(self, index: int, y: float) -> str:
        x, words = self.centre(index), self.stages[index].tick
        if self.stages[index].layer is not None or self.pitch >= 7 * len(words):
            return text(x, y + 15, words, text_anchor="middle")
        # Slanted away from the layers' numbers: to the left before them, to the right after them.
        side = -1 if index < len(self.stages) / 2 else 1
        turn = f"rotate({55 * side} {x:.1f} {y + 10:.1f})"
        anchor = "end" if side < 0 else "start"
        return text(x, y + 13, words, text_anchor=anchor, transform=turn)


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
        powers = [math.log10(value) for value in values if 0 < value < math.inf]
        low = math.floor(min(powers)) if powers else -8
        high = max(math.ceil(max(powers)) if powers else 0, low + 2)
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
