"""Percentage of elements that are similar: |c - g| <= atol + rtol |g|, as isclose means it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.metrics.base import Chunk
from layerparity.site import Kind


@dataclass(frozen=True)
class SimilarityPercentage:
    """100 x similar elements / all elements; an element that is not finite is similar to none.

    The seeds name the metric and its limit (95 %) but no tolerance: 1 % of the golden's value,
    about one step of bfloat16, and 1e-5 near zero.
    """

    rtol: float = 1e-2
    atol: float = 1e-5
    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> tuple[int, int]:
        """Return (similar, all) of nothing."""
        return (0, 0)

    def update(self, state: tuple[int, int], chunk: Chunk) -> tuple[int, int]:
        """Count the chunk's similar elements."""
        bound = chunk.golden64.abs().mul_(self.rtol).add_(self.atol)
        similar = int(torch.count_nonzero(chunk.abs_diff <= bound))
        return state[0] + similar, state[1] + chunk.size

    def compute(self, state: tuple[int, int]) -> float:
        """Return the percentage; NaN of nothing."""
        return 100.0 * state[0] / state[1] if state[1] else float("nan")


METRIC = SimilarityPercentage()
