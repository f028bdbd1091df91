"""Shade: from an error to a step of the colour scale, logarithmically, and the key to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from layerparity.compare.report.colour import STEPS
from layerparity.compare.report.svg import tag

_DECADES = 3.0


@dataclass(frozen=True)
class Shade:
    """A logarithmic scale from ``low`` to ``high``, both exponents of ten."""

    low: float
    high: float

    @classmethod
    def over(cls, errors: Iterable[float], wrong: float = 1.0, limit: float = 0.0) -> Shade:
        """Fit the scale to the positive finite errors, but for the smallest tenth, which is pale.

        It spans three decades or more, so that small differences do not look dramatic. The room is
        taken above small errors (they stay pale) and below those that are ``wrong`` for certain.
        It reaches to the ``limit``, where there is one: what is far from it stays pale too.
        """
        found = sorted(math.log10(error) for error in errors if 0 < error < math.inf)
        top = math.log10(wrong)
        if not found:
            return cls(top - _DECADES, top)
        low = found[len(found) // 10]
        reach = [math.log10(limit)] if limit > 0 else []
        high = max(found[-1], min(top, low + _DECADES), *reach)
        return cls(min(low, high - _DECADES), high)

    def step(self, error: float) -> int:
        """Return the step of a positive finite error."""
        share = (math.log10(error) - self.low) / (self.high - self.low)
        return min(max(int(share * STEPS), 0), STEPS - 1)

    def classes(self, error: float) -> tuple[str, str]:
        """Return the CSS classes of a cell and of the text on it."""
        if error == 0:
            return "qz", "tz"
        if not math.isfinite(error):
            return "qn", "tn"
        step = self.step(error)
        return f"q{step}", f"t{step}"


def key(least: str, most: str, limited: bool = False) -> str:
    """Return the key of a heat map as a list: the scale between its ends, and special cells."""
    swatches = "".join(tag("i", "", class_=f"w{step}") for step in range(STEPS))
    scale = tag("span", swatches, class_="scale", aria_hidden="true")
    items = [
        tag("li", escape(least), " ", scale, " ", escape(most)),
        _item("wz", "error exactly 0"),
        _item("wn", "NaN or infinite"),
        _item("wb", "no value"),
    ]
    if limited:
        items.append(tag("li", "◥ beyond its limit"))
    return tag("ul", *items, class_="key")


def _item(swatch: str, words: str) -> str:
    return tag("li", tag("i", "", class_=f"swatch {swatch}", aria_hidden="true"), f" {words}")
