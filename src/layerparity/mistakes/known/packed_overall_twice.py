"""The scale of a whole weight is applied twice or not at all, or exponents have another bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import unpacked_as
from layerparity.numbers.pieces import Pieces


def _twice(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with the overall scale twice."""
    return pieces._replace(scales=pieces.scales * pieces.overall).values()


def _dropped(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] without the overall scale."""
    return pieces._replace(scales=pieces.scales / pieces.overall).values()


def _biased(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with scales twice as large."""
    return pieces._replace(scales=pieces.scales * 2).values()


FAULT = unpacked_as(
    "packed_overall_twice",
    "the scale of the whole weight was applied twice",
    _twice,
    ("NVFP4",),
)
_OTHERS = (
    unpacked_as(
        "packed_overall_dropped",
        "the scale of the whole weight was not applied",
        _dropped,
        ("NVFP4",),
    ),
    unpacked_as(
        "packed_exponent_bias",
        "the exponents of e8m0 scales were biased by 126 instead of 127",
        _biased,
        ("MXFP4",),
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
