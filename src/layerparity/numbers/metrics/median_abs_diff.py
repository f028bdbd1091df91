"""Median absolute difference, from a histogram, to within 0.4 % of its value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Chunk
from layerparity.numbers.pair_sums import BINS, DROPPED_BITS


@dataclass(frozen=True)
class MedianAbsDiff:
    """Middle of the bin that holds the lower median of |candidate - golden|.

    Error bound: 2^-8 of the value between 1.2e-38 and 3.4e38 (smaller differences: 4.6e-41
    absolute; exactly equal tensors give 0). Sorting would be exact and dozens of times slower.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> np.ndarray:
        """Return an empty histogram over float32's bit patterns without sign."""
        return np.zeros(BINS, dtype=np.int64)

    def update(self, state: np.ndarray, chunk: Chunk) -> np.ndarray:
        """Add the chunk's histogram."""
        state += chunk.numbers.histogram
        return state

    def compute(self, state: np.ndarray) -> float:
        """Return the middle of the median's bin; NaN of nothing."""
        seen = np.cumsum(state)
        total = int(seen[-1])
        if total == 0:
            return float("nan")
        index = int(np.searchsorted(seen, (total + 1) // 2))
        if index == 0:
            return 0.0
        edges = np.array([index, index + 1], dtype=np.int32) << DROPPED_BITS
        return float(edges.view(np.float32).astype(np.float64).mean())


METRIC = MedianAbsDiff()
