"""Absolute differences |d| of the elements, in the tensor's own units: max, mean, median, std."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import FLOATING, Additive, Chunk, Largest
from layerparity.numbers.pair_sums import DROPPED_BITS, added


def mean(count: float, total: float) -> float:
    """Return the mean of |d| from the sum of |d|; NaN of nothing."""
    return total / count if count else float("nan")


def standard_deviation(count: float, total: float, squares: float) -> float:
    """Return the standard deviation of |d| (of a sample, as torch's) from the sums of |d| and d^2.

    NaN of fewer than two. The cancelled sum leaves 1e-8 of the mean where all differences are
    equal, which is below anything read from it.
    """
    if count < 2:
        return float("nan")
    return math.sqrt(max(0.0, squares - total * total / count) / (count - 1))


@dataclass(frozen=True)
class Median:
    """Middle of the histogram's bin that holds the lower median of |d|.

    Error bound: 2^-8 of the value (0.4 %) between 1.2e-38 and 3.4e38 (smaller differences: 4.6e-41
    absolute; exactly equal tensors give 0). Sorting would be exact and dozens of times slower.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> np.ndarray:
        """Return a histogram of no bins; see `PairSums`."""
        return np.zeros((2, 0), dtype=np.int64)

    def update(self, state: np.ndarray, chunk: Chunk) -> np.ndarray:
        """Return the state with the chunk's histogram added."""
        return added(state, chunk.sums.histogram)

    def compute(self, state: np.ndarray) -> float:
        """Return the middle of the median's bin; NaN of nothing."""
        bins, counts = state
        if not bins.size:
            return float("nan")
        seen = np.cumsum(counts)
        index = int(bins[np.searchsorted(seen, (int(seen[-1]) + 1) // 2)])
        # The first bin holds the equal elements, which its middle would make unequal.
        if index == 0:
            return 0.0
        # A bin's number is the upper half of a float32: shifted back it is the bin's lower edge.
        edges = np.array([index, index + 1], dtype=np.int32) << DROPPED_BITS
        return float(edges.view(np.float32).astype(np.float64).mean())


METRICS = {
    "max_abs_diff": Largest("max_abs_diff", kinds=FLOATING),
    "mean_abs_diff": Additive(("count", "abs_diff_sum"), mean, kinds=FLOATING),
    "median_abs_diff": Median(),
    "std_abs_diff": Additive(("count", "abs_diff_sum", "diff_squares"), standard_deviation),
}
