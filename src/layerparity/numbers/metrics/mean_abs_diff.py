"""Mean absolute difference over all elements, in the tensor's own units."""

from __future__ import annotations

from layerparity.numbers.metric import FLOATING, Additive


def mean(count: float, total: float) -> float:
    """Return the mean; NaN of nothing."""
    return total / count if count else float("nan")


METRIC = Additive(("count", "abs_diff_sum"), mean, kinds=FLOATING)
