"""Sums: matrix products that add their terms in another order, or more precisely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from layerparity.numerics.mode import Mode, Operation

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Linear(Mode):
    """Replace every ``linear(input, weight)`` by ``product``; the bias is added afterwards."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def run(self, func: Operation, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run one operation, a linear layer by the product."""
        return (self._linear if func is linear else func)(*args, **named)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = self.product(input, weight)
        return result if bias is None else result + bias


def sharded(shards: int) -> Product:
    """Return a product of partial sums, each rounded, as tensor parallelism adds them."""

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(input.chunk(shards, -1), weight.chunk(shards, -1), strict=True)
        return _added(linear(left, right) for left, right in parts)

    return product


def strided(shards: int) -> Product:
    """Return a product of partial sums over every ``shards``-th term."""

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        count = min(shards, input.shape[-1])
        return _added(
            linear(input[..., start::count], weight[..., start::count]) for start in range(count)
        )

    return product


def pairwise(shards: int) -> Product:
    """Return a product of partial sums that are added two by two, as a reduction tree does."""

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(input.chunk(shards, -1), weight.chunk(shards, -1), strict=True)
        sums = [linear(left, right) for left, right in parts]
        while len(sums) > 1:
            odd = sums[-1:] if len(sums) % 2 else []
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
        return sums[0]

    return product


def shuffled(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with the terms of each sum in a fixed random order."""
    order = torch.randperm(input.shape[-1], generator=torch.Generator().manual_seed(0))
    order = order.to(input.device)
    return linear(input[..., order], weight[..., order])


def backwards(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with the terms of each sum in the opposite order."""
    return linear(input.flip(-1), weight.flip(-1))


def accumulated(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Accumulate in float64 and round once."""
    return linear(input.double(), weight.double()).to(input.dtype)


def _added(partials: Iterable[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for partial in partials:
        total = partial if total is None else total + partial
    assert total is not None
    return total
