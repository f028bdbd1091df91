"""Relative L2 error: norm of the difference over norm of the golden."""

from __future__ import annotations

import math

from layerparity.numbers.metric import FLOATING, Additive


def relative(count: float, diff_squares: float, golden_squares: float) -> float:
    """Return ||d|| / ||g||: 0 where both are zero, Inf where only the golden is, NaN of nothing."""
    if not count:
        return float("nan")
    if golden_squares == 0:
        return math.inf if diff_squares else 0.0
    return math.sqrt(diff_squares) / math.sqrt(golden_squares)


METRIC = Additive(("count", "diff_squares", "golden_squares"), relative, kinds=FLOATING)
