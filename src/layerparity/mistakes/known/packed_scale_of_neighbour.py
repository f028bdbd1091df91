"""Scales of packed weights are laid on other numbers than their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import unpacked_as
from layerparity.numbers.pieces import Pieces


def _moved(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with scales moved by one group, or by one row."""
    axis = 1 if pieces.scales.shape[1] > 1 else 0
    return pieces._replace(scales=pieces.scales.roll(1, axis)).values()


def _turned(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with scales [group, row] taken for [row, group]."""
    scales = pieces.scales
    return pieces._replace(scales=scales.T.reshape(scales.shape)).values()


def _widened(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with the scales of the first half of the groups."""
    half = -(-pieces.scales.shape[1] // 2)
    zeros = None if pieces.zeros is None else pieces.zeros[:, :half]
    order = None if pieces.order is None else pieces.order // 2
    width, scales = 2 * pieces.width, pieces.scales[:, :half]
    return pieces._replace(scales=scales, zeros=zeros, order=order, width=width).values()


def _unscaled(pieces: Pieces) -> torch.Tensor:
    """Return the numbers [row, column], less their zero points."""
    return pieces._replace(scales=torch.ones_like(pieces.scales)).values()


FAULT = unpacked_as(
    "packed_scale_of_neighbour",
    "each group was multiplied by the scale of its neighbour",
    _moved,
)
_OTHERS = (
    unpacked_as("packed_scale_axis", "the scales were laid along the other axis", _turned),
    unpacked_as(
        "packed_group_size", "the groups were taken to be twice as wide as they are", _widened
    ),
    unpacked_as(
        "packed_scale_dropped",
        "the scales were dropped while packed weights were loaded",
        _unscaled,
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
