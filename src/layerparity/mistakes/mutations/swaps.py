"""Swaps: neighbouring heads, experts or channels change places, or an expert's gate and up."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from torch import nn

from layerparity.mistakes.block import head_dim
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.mutations.base import HEAD_COLUMNS, HEAD_ROWS, Mutation, of_weight
from layerparity.mistakes.parts import Part, exchange, parts

TIMES = 3


def swaps(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield neighbours swapped in each weight, at a few places each."""
    size = head_dim(block)
    for part in parts(block):
        experts, rows, columns = part.view(block).shape
        for _ in range(TIMES):
            if experts > 1:
                yield _swap(part, "experts", 0, draw.randrange(experts - 1), 1)
            yield _swap(part, "channels", 1, draw.randrange(rows - 1), 1)
            if columns > 1:
                yield _swap(part, "inputs", 2, draw.randrange(columns - 1), 1)
            if size and part.name in HEAD_ROWS and rows > size:
                yield _swap(part, "heads", 1, draw.randrange(rows // size - 1), size)
            if size and part.name == HEAD_COLUMNS:
                yield _swap(part, "heads", 2, draw.randrange(columns // size - 1), size)
            if part.name == "mlp.experts.gate":
                yield _gate_with_up(part, draw.randrange(experts))


def _swap(part: Part, what: str, axis: int, first: int, size: int) -> Mutation:
    """Swap two neighbouring groups of ``size`` along an axis of [expert, row, column]."""
    start = first * size

    def plant(block: nn.Module, surgery: Surgery) -> None:
        exchange(
            part.view(block).narrow(axis, start, size),
            part.view(block).narrow(axis, start + size, size),
        )

    last = [0, 0, 0]
    last[axis] = start + 2 * size - 1
    story = f"{part.name} {what} {first} and {first + 1} swapped"
    return of_weight("swap", story, part, size=1.0, place=(last[0], last[1], last[2]), plant=plant)


def _gate_with_up(gate: Part, expert: int) -> Mutation:
    up = Part("mlp.experts.up", gate.component, gate.path, half=1)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        exchange(gate.view(block)[expert], up.view(block)[expert])

    story = f"mlp.experts gate and up of expert {expert} swapped"
    return of_weight("swap", story, gate, size=1.0, place=(expert, 0, 0), plant=plant)
