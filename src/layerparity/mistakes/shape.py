"""Shape: what a list of errors or slopes looks like, in single numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from layerparity.mistakes.cause import Evidence


def finite(values: Sequence[float]) -> list[float]:
    """Return the values that are numbers."""
    return [value for value in values if math.isfinite(value)]


def median(values: Sequence[float]) -> float:
    """Return the median of the finite values; 0 of none."""
    kept = finite(values)
    return statistics.median(kept) if kept else 0.0


def spread(values: Sequence[float]) -> float:
    """Return the coefficient of variation: standard deviation over the mean's size; Inf of none."""
    kept = finite(values)
    mean = abs(statistics.fmean(kept)) if kept else 0.0
    return statistics.pstdev(kept) / mean if mean else math.inf


def trend(values: Sequence[float], order: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values with an order, -1 to 1; 0 below four pairs."""
    pairs = [(v, o) for v, o in zip(values, order, strict=False) if math.isfinite(v)]
    if len(pairs) < 4:
        return 0.0
    left, right = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    return statistics.correlation(left, right)


def factor_of(evidence: Evidence, local: str | None = None) -> float | None:
    """Return the factor by which a site's golden comes nearest to the candidate; None if unknown.

    It is <g, c> / <g, g> = ||c|| / ||g|| times their cosine.
    """
    ratio = evidence.metric("norm_ratio", local)
    distance = evidence.metric("cosine_distance", local)
    if ratio is None or distance is None or not math.isfinite(ratio):
        return None
    return ratio * (1 - distance)


def factor_share(evidence: Evidence, local: str | None = None) -> float:
    """Return how much of a site's error one common factor explains, 0 to 1.

    Of c - g, what lies along g is (factor - 1) g: its size over that of all is |factor - 1| over
    the relative L2 error, all of them over the same elements, none weighted.
    """
    factor, error = factor_of(evidence, local), evidence.metric("rel_l2", local)
    if factor is None or not error or not math.isfinite(error):
        return 0.0
    return min(abs(factor - 1) / error, 1.0)


def blocks_of(values: Sequence[float], count: int) -> list[list[float]]:
    """Return values cut into ``count`` equal runs, such as channels into heads; [] if uneven."""
    if count < 1 or len(values) < count or len(values) % count:
        return []
    size = len(values) // count
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def outliers(values: Sequence[float], part: float = 0.25) -> list[int]:
    """Return the indices whose size is over ``part`` of the largest: what differs."""
    kept = [abs(value) if math.isfinite(value) else 0.0 for value in values]
    worst = max(kept, default=0.0)
    return [index for index, size in enumerate(kept) if worst and size > part * worst]


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for index in order[start : end + 1]:
            ranks[index] = (start + end) / 2
        start = end + 1
    return ranks
