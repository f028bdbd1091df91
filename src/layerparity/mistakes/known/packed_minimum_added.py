"""The minimum of a block is added to its numbers instead of taken off, or left out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import unpacked_as
from layerparity.numbers.pieces import WITH_OFFSETS, Pieces


def _turned(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with offsets of the other sign."""
    offsets = None if pieces.offsets is None else -pieces.offsets
    return pieces._replace(offsets=offsets).values()


def _dropped(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] without offsets."""
    return pieces._replace(offsets=None).values()


FAULT = unpacked_as(
    "packed_minimum_added",
    "the minimum of each block was taken with the other sign",
    _turned,
    WITH_OFFSETS,
)
_OTHERS = (
    unpacked_as(
        "packed_minimum_dropped", "the minimum of each block was left out", _dropped, WITH_OFFSETS
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
