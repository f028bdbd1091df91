"""Slips and scales: a weight is slightly too large, or one head, channel or expert is scaled."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from layerparity.mistakes.block import head_dim
from layerparity.mistakes.fault import Plant, Surgery
from layerparity.mistakes.mutations.base import HEAD_COLUMNS, HEAD_ROWS, SIZES, Mutation, of_weight
from layerparity.mistakes.parts import Part, parts

_EVERY = slice(None)
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
                yield _expert(part, draw.randrange(experts), factor)
            else:
                yield _rows(part, f"channel {row}", slice(row, row + 1), factor)
            if size and part.name in HEAD_ROWS and rows > size:
                head = draw.randrange(rows // size)
                yield _rows(part, f"head {head}", slice(head * size, (head + 1) * size), factor)
            if size and part.name == HEAD_COLUMNS:
                head = draw.randrange(columns // size)
                yield _columns(part, head, size, factor)


def _expert(part: Part, expert: int, factor: float) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            part.view(block)[expert] *= factor

    return _scale(part, f"expert {expert}", factor, (expert, 0, 0), plant)


def _rows(part: Part, what: str, rows: slice, factor: float) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            part.view(block)[:, rows] *= factor

    return _scale(part, what, factor, (0, rows.stop - 1, 0), plant)


def _columns(part: Part, head: int, size: int, factor: float) -> Mutation:
    columns = slice(head * size, (head + 1) * size)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            part.view(block)[:, :, columns] *= factor

    return _scale(part, f"head {head}", factor, (0, 0, columns.stop - 1), plant)


def _scale(
    part: Part, what: str, factor: float, place: tuple[int, int, int], plant: Plant
) -> Mutation:
    story = f"{part.name} {what} times {factor:g}"
    return of_weight("scale", story, part, size=abs(1 - factor), place=place, plant=plant)


def _slip(part: Part, size: float, at: tuple[int | None, int | None, int | None]) -> Mutation:
    """Slip the expert, row and column that are given; all of what is None."""
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
    return of_weight("slip", " ".join(words), part, size=size, place=place, plant=plant)
