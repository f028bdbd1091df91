"""One metric as a reader meets it: label, meaning, which way is worse, how a value is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerparity.ground.numeral import numeral, percent, power

_CAP_DB = 320.0


@dataclass(frozen=True)
class Measure:
    """One metric, and what a reader must know of it.

    ``ideal`` is its value for identical tensors, ``bound`` the side a limit is on (``jointly``: it
    counts only together with another metric), and ``wrong`` an error that nobody takes for
    rounding. A ``detail`` stands with its site alone, not in the tables of many sites. ``against``
    is the tensor that an error is measured from, where two stand side by side that differ in it. A
    ``part`` is a share of the tokens, written as a percentage. ``group`` is what the worst is taken
    of: ``head``, ``channel``, ``expert`` or ``position``. ``unit`` is what a value counts; ratios
    and shares have none.
    """

    name: str
    label: str
    meaning: str
    ideal: float = 0.0
    bound: str = "below"
    wrong: float = 1.0
    detail: bool = False
    against: str = ""
    part: bool = False
    group: str = ""
    unit: str = ""

    def badness(self, value: float) -> float:
        """Return the distance from the ideal (0 is bit-equal); NaN stays NaN."""
        if self.ideal == math.inf:
            # Decibels back to the ratio error / signal. The metric ends at the cap: no difference.
            return 0.0 if value >= _CAP_DB else 10.0 ** (-max(value, -_CAP_DB) / 20)
        return abs(value - self.ideal)

    def allowed(self, limit: float) -> float:
        """Return the largest badness that a limit lets pass."""
        return limit if self.bound == "within" else self.badness(limit)

    def show(self, value: float) -> str:
        """Write a value so that one close to its ideal is never rounded onto it."""
        gap = value - self.ideal
        if self.part and math.isfinite(value):
            shown = percent(value)
            # What is not all of them is never rounded to 100 %.
            return f"{100 * value:.6g} %" if shown == "100 %" and gap else shown
        if self.ideal == 1 and 0 < abs(gap) < 1e-3:
            return f"1{'−' if gap < 0 else '+'}{power(abs(gap), 0)}"
        if self.ideal == 1 and gap and numeral(value) == "1":
            return numeral(value, 4)
        if self.ideal == 100 and 0 < -gap < 1:
            return f"{value:.6g}" if -gap > 1e-4 else "<100"
        return numeral(value)

    def told(self, value: float) -> str:
        """Write a value with its unit, where it stands by itself."""
        return f"{self.show(value)} {self.unit}" if self.unit else self.show(value)

    def side(self, limit: float) -> str:
        """Write a limit in words, such as ``below 0.01``."""
        if self.bound == "jointly":
            return f"up to {numeral(limit)}, or not significant"
        around = " of 1" if self.bound == "within" else ""
        return f"{self.bound} {numeral(limit)}{around}"
