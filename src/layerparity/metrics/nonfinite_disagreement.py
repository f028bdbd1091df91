"""Number of elements that are NaN, +Inf or -Inf on one side and something else on the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.metrics.base import Chunk
from layerparity.site import Kind


@dataclass(frozen=True)
class NonfiniteDisagreement:
    """Count of elements whose class (finite, NaN, +Inf, -Inf) differs; two NaN agree."""

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> int:
        """Return 0."""
        return 0

    def update(self, state: int, chunk: Chunk) -> int:
        """Add the chunk's disagreements; a chunk of finite values costs nothing."""
        if chunk.finite is None:
            return state
        differs = _class(chunk.golden) != _class(chunk.candidate)
        return state + int(torch.count_nonzero(differs))

    def compute(self, state: int) -> float:
        """Return the count."""
        return float(state)


def _class(tensor: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 +Inf, 2 -Inf, 3 NaN."""
    value = tensor.double()
    infinite = torch.isinf(value) * torch.where(value > 0, 1, 2)
    return torch.where(torch.isnan(value), 3, infinite)


METRIC = NonfiniteDisagreement()
