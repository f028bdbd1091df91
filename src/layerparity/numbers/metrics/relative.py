"""Differences in relation to the tensors themselves: their size, their angle, their correlation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import FLOATING, Additive, Chunk
from layerparity.numbers.pair_sums import Moments

# float64 resolves no more (20 log10 2^53); a finite cap keeps equal tensors on a chart.
CAP_DB = 320.0
# A float64 mean is off by a few 1e-16 of itself, and so are "deviations" from it: less is constant.
_CONSTANT = 1e-14


def relative_l2(count: float, dd: float, gg: float) -> float:
    """Return ||d|| / ||g|| from the sums of d^2 and g^2.

    0 where both are zero, Inf where only the golden is, NaN of nothing.
    """
    if not count:
        return float("nan")
    if gg == 0:
        return math.inf if dd else 0.0
    # Each root by itself: a quotient of squares leaves float64's range sooner.
    return math.sqrt(dd) / math.sqrt(gg)


def norm_ratio(count: float, cc: float, gg: float) -> float:
    """Return ||c|| / ||g|| from the sums of c^2 and g^2: what a scale does, which no cosine sees.

    1 where both are zero, Inf where only the golden is, NaN of nothing.
    """
    if not count:
        return float("nan")
    if gg == 0:
        return math.inf if cc else 1.0
    return math.sqrt(cc) / math.sqrt(gg)


def signal_to_noise(count: float, gg: float, dd: float) -> float:
    """Return 10 log10(||g||^2 / ||d||^2), in decibels, from the sums of g^2 and d^2.

    Within +-`CAP_DB`: the cap where the tensors are equal. NaN of nothing.
    """
    if not count:
        return float("nan")
    if dd == 0:
        return CAP_DB
    if gg == 0:
        return -CAP_DB
    decibels = 10 * (math.log10(gg) - math.log10(dd))
    return max(-CAP_DB, min(CAP_DB, decibels))


def cosine_distance(count: float, gg: float, cc: float, gd: float, dd: float) -> float:
    """Return 1 - cos(g, c) from the sums of g^2, c^2, g*d and d^2, without cancellation.

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
    # From a right angle on nothing cancels.
    if cosine <= 0:
        return min(2.0, 1.0 - cosine)
    # Divided one norm at a time: products of four would leave float64's range first.
    along = gd / gg
    # Rounding may leave less than nothing of vectors that are parallel.
    square = max(0.0, dd / gg - along * along) * (gg / cc)
    return square / (1.0 + min(1.0, cosine))


@dataclass(frozen=True)
class Pearson:
    """Pearson correlation of both tensors' elements, never outside -1 to 1.

    Deviations from the means are merged chunk by chunk without cancellation (`Moments.merge`). A
    constant tensor has no correlation: 1 where both are constant (neither varies where the other
    does not), 0 where one is. One element is constant. NaN of nothing.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> Moments:
        """Return the moments of nothing."""
        return Moments()

    def update(self, state: Moments, chunk: Chunk) -> Moments:
        """Merge the chunk's moments into the state."""
        return state.merge(chunk.sums.moments)

    def compute(self, state: Moments) -> float:
        """Return the correlation."""
        if not state.size:
            return float("nan")
        golden = _varies(state.gg, state.golden, state.size)
        candidate = _varies(state.cc, state.candidate, state.size)
        if not (golden and candidate):
            return 1.0 if golden == candidate else 0.0
        return max(-1.0, min(1.0, state.gc / (math.sqrt(state.gg) * math.sqrt(state.cc))))


def _varies(squares: float, mean: float, count: int) -> bool:
    return squares > count * (_CONSTANT * mean) ** 2


METRICS = {
    "cosine_distance": Additive(
        ("count", "golden_squares", "candidate_squares", "golden_diff", "diff_squares"),
        cosine_distance,
    ),
    "norm_ratio": Additive(("count", "candidate_squares", "golden_squares"), norm_ratio),
    "pearson": Pearson(),
    "rel_l2": Additive(("count", "diff_squares", "golden_squares"), relative_l2, kinds=FLOATING),
    "snr_db": Additive(("count", "golden_squares", "diff_squares"), signal_to_noise),
}
