"""Pearson correlation of both tensors' elements, never outside -1 to 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Chunk
from layerparity.numbers.pair_sums import Moments

# A float64 mean is off by a few 1e-16 of itself, and so are "deviations" from it: less is constant.
_CONSTANT = 1e-14


@dataclass(frozen=True)
class Pearson:
    """Correlation of deviations from the means, merged chunk by chunk without cancellation.

    A constant tensor has no correlation: 1 where both are constant (neither varies where the other
    does not), 0 where one is. One element is constant. NaN of nothing.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> Moments:
        """Return the moments of nothing."""
        return Moments()

    def update(self, state: Moments, chunk: Chunk) -> Moments:
        """Merge the chunk's moments into the state."""
        return state.merge(chunk.numbers.moments)

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


METRIC = Pearson()
