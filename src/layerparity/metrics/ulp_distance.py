"""Largest distance in ULP: steps of the candidate's dtype between golden and candidate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.metrics.base import Chunk
from layerparity.site import Kind

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        if not chunk.count or not chunk.candidate.is_floating_point():
            return state
        candidate = chunk.kept(chunk.candidate)
        golden = chunk.kept(chunk.golden).to(candidate.dtype)
        return max(_largest(golden, candidate), state)

    def compute(self, state: float) -> float:
        """Return the largest distance."""
        return state


def _largest(golden: torch.Tensor, candidate: torch.Tensor) -> float:
    g, c = _ordered(golden), _ordered(candidate)
    gaps = torch.maximum(g, c) - torch.minimum(g, c)
    wrapped = gaps < 0 if float(gaps.min()) < 0 else None
    if wrapped is None:
        return float(gaps.max())
    return float(gaps[wrapped].max()) + 2.0 ** (8 * g.element_size())


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return integers whose differences are steps: bits without sign, negated where it is set."""
    kind = _BITS[values.element_size()]
    bits = values.view(kind)
    sign = bits >> (8 * bits.element_size() - 1)
    return (bits & torch.iinfo(kind).max).bitwise_xor_(sign).sub_(sign)


METRIC = UlpDistance()
