"""Scales: one head, channel or expert is scaled, zeroed or given the other sign."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from layerparity.mistakes.block import head_dim
from layerparity.mistakes.fault import Plant, Surgery
from layerparity.mistakes.mutations.base import HEAD_COLUMNS, HEAD_ROWS, Mutation, of_weight
from layerparity.mistakes.parts import Part, parts

FACTORS = (-1.0, 0.0, 0.5, 0.9, 0.97, 0.99, 0.997, 0.999)


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
