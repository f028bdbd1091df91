"""Standard deviation of the absolute differences (of the population), in the tensor's own units."""

from __future__ import annotations

import math

from layerparity.numbers.metric import Additive


def spread(count: float, total: float, squares: float) -> float:
    """Return the standard deviation of |d| from the sums of |d| and d^2; NaN of nothing.

    The cancelled sum leaves 1e-8 of the mean where all differences are equal, which is below
    anything read from it.
    """
    if not count:
        return float("nan")
    mean = total / count
    return math.sqrt(max(0.0, squares / count - mean * mean))


METRIC = Additive(("count", "abs_diff_sum", "diff_squares"), spread)
