"""Cosine distance, 1 - cos of the angle between both tensors, computed from their difference."""

from __future__ import annotations

import math

from layerparity.numbers.metric import Additive


def distance(count: float, gg: float, cc: float, gd: float, dd: float) -> float:
    """Return 1 - cos(g, c) from the sums of g^2, c^2, g*d and d^2, where d = c - g.

    For unit vectors 1 - cos = ||u - v||^2 / 2; without normalising first, the part of d that is
    square to g gives sin^2 = (gg dd - gd^2) / (gg cc), and 1 - cos = sin^2 / (1 + cos). Where both
    are zero the distance is 0, where one is, 1 (no direction is shared); NaN of nothing.
    """
    if not count:
        return float("nan")
    if gg == 0 or cc == 0:
        return 0.0 if gg == cc else 1.0
    norms = math.sqrt(gg) * math.sqrt(cc)
    cosine = (gg + gd) / norms
    if cosine <= 0:
        return min(2.0, 1.0 - cosine)
    # Divided one norm at a time: products of four would leave float64's range first.
    along = gd / gg
    square = max(0.0, dd / gg - along * along) * (gg / cc)
    return square / (1.0 + min(1.0, cosine))


METRIC = Additive(
    ("count", "golden_squares", "candidate_squares", "golden_diff", "diff_squares"), distance
)
