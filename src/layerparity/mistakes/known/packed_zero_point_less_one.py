"""Zero points are off by one, as where a format stores them less one, or have the other sign."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import INTEGERS, unpacked_as
from layerparity.numbers.pieces import CENTRES, Pieces


def _less_one(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with zero points less one."""
    zeros = torch.zeros_like(pieces.scales) if pieces.zeros is None else pieces.zeros
    return pieces._replace(zeros=zeros - 1).values()


def _added(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with zero points of the other sign."""
    zeros = None if pieces.zeros is None else -pieces.zeros
    return pieces._replace(zeros=zeros).values()


def _unsigned(centre: int, pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] of numbers that are not centred on zero."""
    return pieces._replace(numbers=pieces.numbers + centre).values()


FAULT = unpacked_as(
    "packed_zero_point_less_one",
    "the zero points were off by one",
    _less_one,
    (*INTEGERS, *CENTRES),
)
_OTHERS = (
    unpacked_as(
        "packed_zero_point_added",
        "the zero points were added instead of subtracted",
        _added,
        INTEGERS,
    ),
    *(
        unpacked_as(
            f"packed_unsigned_{name.lower()}",
            f"{centre} was not taken off the numbers of {name}",
            partial(_unsigned, centre),
            (name,),
        )
        for name, centre in CENTRES.items()
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
