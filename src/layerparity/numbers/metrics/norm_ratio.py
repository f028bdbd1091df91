"""Ratio of the candidate's norm to the golden's: what a scale does, which no cosine sees."""

from __future__ import annotations

import math

from layerparity.numbers.metric import Additive


def ratio(count: float, candidate_squares: float, golden_squares: float) -> float:
    """Return ||c|| / ||g||: 1 where both are zero, Inf where only the golden is, NaN of nothing."""
    if not count:
        return float("nan")
    if golden_squares == 0:
        return math.inf if candidate_squares else 1.0
    return math.sqrt(candidate_squares) / math.sqrt(golden_squares)


METRIC = Additive(("count", "candidate_squares", "golden_squares"), ratio)
