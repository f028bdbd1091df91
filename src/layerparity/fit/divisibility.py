"""Divisibility: which degrees of tensor parallelism split an architecture evenly."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.backends._neuron.sharding import common_divisors
from layerparity.fit.shape import Shape

EXPERTS = "experts"


@dataclass(frozen=True)
class Divided:
    """One size of an architecture, and the degrees that divide it."""

    what: str
    size: int

    @property
    def divisors(self) -> list[int]:
        """Every number that divides it, ascending."""
        return common_divisors(self.size)


def divided(shape: Shape) -> list[Divided]:
    """Return what tensor parallelism divides; experts, which expert parallelism does, come last."""
    rows = [
        Divided("attention heads", shape.heads),
        Divided("KV heads", shape.kv_heads),
        Divided("intermediate size", shape.intermediate),
    ]
    if shape.experts and shape.expert_intermediate != shape.intermediate:
        rows.append(Divided("intermediate size of an expert", shape.expert_intermediate))
    return [*rows, Divided(EXPERTS, shape.experts)] if shape.experts else rows


def degrees(shape: Shape) -> list[int]:
    """Return every tp_degree that divides heads, KV heads and intermediate sizes, ascending."""
    return common_divisors(*(row.size for row in divided(shape) if row.what != EXPERTS))
