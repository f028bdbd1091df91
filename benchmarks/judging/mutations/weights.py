"""A weight goes wrong: slightly too large, a group of it scaled, two neighbours exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from judging.mutations.base import HEAD_COLUMNS, HEAD_ROWS, SIZES, Mutation, of_weight
from layerparity.mistakes.block import head_dim
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.parts import Part, exchange, parts

_EVERY = slice(None)
# The rule that is true of one group of a weight that is wrong, by what the group is called.
_ONE = {"expert": "one_expert", "head": "one_head", "channel": "one_channel"}
# The rule that is true of a weight's groups in another order, by what they are and their axis.
ORDERED = {
    ("channels", 1): ("channels_permuted",),
    ("heads", 1): ("channels_permuted",),
    ("heads", 2): ("heads_exchanged",),
}
# Places in each weight where neighbours are exchanged.
TIMES = 3
FACTORS = (-1.0, 0.0, 0.5, 0.9, 0.97, 0.99, 0.997, 0.999)


def slips(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield slips of every size in every weight of a block."""
    for part in parts(block):
        experts, rows, columns = part.view(block).shape
        for size in SIZES:
            expert, row, column = (draw.randrange(n) for n in (experts, rows, columns))
            one = expert if experts > 1 else None
            yield _slip(part, size, (None, None, None))
            yield _slip(part, size, (one, row, None))
            if columns > 1:
                yield _slip(part, size, (one, None, column))
            if experts > 1:
                yield _slip(part, size, (one, None, None))


def scales(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a head, an expert and a channel of each weight that has them, by every factor."""
    size = head_dim(block)
    for part in parts(block):
        experts, rows, columns = part.view(block).shape
        for factor in FACTORS:
            row = draw.randrange(rows)
            if experts > 1:
                yield _scale(part, "expert", 0, draw.randrange(experts), factor)
            else:
                yield _scale(part, "channel", 1, row, factor)
            if size and part.name in HEAD_ROWS and rows > size:
                yield _scale(part, "head", 1, draw.randrange(rows // size), factor, size=size)
            if size and part.name == HEAD_COLUMNS:
                yield _scale(part, "head", 2, draw.randrange(columns // size), factor, size=size)


def swaps(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield neighbours swapped in each weight, at a few places each."""
    size = head_dim(block)
    for part in parts(block):
        experts, rows, columns = part.view(block).shape
        for _ in range(TIMES):
            if experts > 1:
                yield _swap(part, "experts", 0, draw.randrange(experts - 1), 1)
            if rows > 1:
                yield _swap(part, "channels", 1, draw.randrange(rows - 1), 1)
            if columns > 1:
                yield _swap(part, "inputs", 2, draw.randrange(columns - 1), 1)
            if size and part.name in HEAD_ROWS and rows // size > 1:
                yield _swap(part, "heads", 1, draw.randrange(rows // size - 1), size)
            if size and part.name == HEAD_COLUMNS and columns // size > 1:
                yield _swap(part, "heads", 2, draw.randrange(columns // size - 1), size)
            if part.name == "mlp.experts.gate":
                yield _gate_with_up(part, draw.randrange(experts))


def _scale(
    part: Part, what: str, axis: int, index: int, factor: float, *, size: int = 1
) -> Mutation:
    """Scale the group ``index`` of ``size`` along an axis of [expert, row, column]."""
    start = index * size

    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            part.view(block).narrow(axis, start, size).mul_(factor)

    last = [0, 0, 0]
    last[axis] = start + size - 1
    place = (last[0], last[1], last[2])
    story = f"{part.name} {what} {index} times {factor:g}"
    off = abs(1 - factor)
    return of_weight("scale", story, part, size=off, place=place, plant=plant, true=(_ONE[what],))


def _slip(part: Part, size: float, at: tuple[int | None, int | None, int | None]) -> Mutation:
    """Slip an expert, a row and a column; all of what is None."""
    expert, row, column = at
    words = [f"{part.name} {size:.1%} too large"]
    words += [f"in row {row}"] if row is not None else []
    words += [f"in column {column}"] if column is not None else []
    words += [f"of expert {expert}"] if expert is not None else []
    where = tuple(_EVERY if each is None else each for each in at)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            part.view(block)[where] *= 1 + size

    place = (expert or 0, row or 0, column or 0)
    true: tuple[str, ...] = ("one_channel",) if row is not None else ()
    true += ("one_expert",) if expert is not None else ()
    true = ("scale",) if at == (None, None, None) else true
    return of_weight("slip", " ".join(words), part, size=size, place=place, plant=plant, true=true)


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
    place, true = (last[0], last[1], last[2]), tuple(_ONE[x] for x in _ONE if f"{x}s" == what)
    true += ORDERED.get((what, axis), ())
    return of_weight("swap", story, part, size=1.0, place=place, plant=plant, true=true)


def _gate_with_up(gate: Part, expert: int) -> Mutation:
    up = Part("mlp.experts.up", gate.component, gate.path, half=1)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        exchange(gate.view(block)[expert], up.view(block)[expert])

    story = f"mlp.experts gate and up of expert {expert} swapped"
    true = ("gate_up_swapped", "one_expert")
    return of_weight("swap", story, gate, size=1.0, place=(expert, 0, 0), plant=plant, true=true)
