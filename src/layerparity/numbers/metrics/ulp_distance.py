"""Largest distance in ULP: steps of the candidate's dtype between golden and candidate."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Chunk
from layerparity.numbers.pair_sums import larger


@dataclass(frozen=True)
class UlpDistance:
    """max steps from golden, rounded to the candidate's dtype, to candidate; +0 and -0 are one.

    Between values of opposite sign near zero the steps are many and mean little.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> float:
        """Return NaN: nothing was seen."""
        return float("nan")

    def update(self, state: float, chunk: Chunk) -> float:
        """Return the larger of what was seen."""
        return larger(state, chunk.numbers.max_ulp)

    def compute(self, state: float) -> float:
        """Return the largest distance."""
        return state


METRIC = UlpDistance()
