"""Signal-to-noise ratio in decibels: the golden's energy over the difference's."""

from __future__ import annotations

import math

from layerparity.numbers.metric import Additive

# float64 resolves no more (20 log10 2^53); a finite cap keeps equal tensors on a chart.
CAP_DB = 320.0


def snr(count: float, golden_squares: float, diff_squares: float) -> float:
    """Return 10 log10(||g||^2 / ||d||^2) within +-`CAP_DB`: the cap where equal; NaN of nothing."""
    if not count:
        return float("nan")
    if diff_squares == 0:
        return CAP_DB
    if golden_squares == 0:
        return -CAP_DB
    decibels = 10 * (math.log10(golden_squares) - math.log10(diff_squares))
    return max(-CAP_DB, min(CAP_DB, decibels))


METRIC = Additive(("count", "golden_squares", "diff_squares"), snr)
