"""Largest absolute difference of any element, in the tensor's own units."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import FLOATING, Chunk
from layerparity.numbers.pair_sums import larger


@dataclass(frozen=True)
class MaxAbsDiff:
    """max |candidate - golden|."""

    kinds: tuple[Kind, ...] = FLOATING

    def start(self) -> float:
        """Return NaN: nothing was seen."""
        return float("nan")

    def update(self, state: float, chunk: Chunk) -> float:
        """Return the larger of what was seen."""
        return larger(state, chunk.numbers.max_abs_diff)

    def compute(self, state: float) -> float:
        """Return the largest difference."""
        return state


METRIC = MaxAbsDiff()
