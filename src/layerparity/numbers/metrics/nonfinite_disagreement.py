"""Number of elements that are NaN, +Inf or -Inf on one side and something else on the other."""

from __future__ import annotations

from layerparity.numbers.metric import Additive


def disagreement(count: float) -> float:
    """Return the count of elements whose class (finite, NaN, +Inf, -Inf) differs."""
    return count


METRIC = Additive(("nonfinite_disagreement",), disagreement)
