"""Slips: one weight is too large by 30 % to 0.1 %, all of it or one row, column or expert."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.mutations.base import SIZES, Mutation, of_weight
from layerparity.mistakes.parts import Part, parts

_EVERY = slice(None)


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
