"""Packed numbers are taken in another order: of a byte, of a word, or of columns by activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import INTEGERS, unpacked_as
from layerparity.numbers.pieces import AWQ_PLACES, IN_NIBBLES, Pieces


def _exchanged(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with the two numbers of each byte exchanged."""
    rows, columns = pieces.numbers.shape
    pairs = pieces.numbers.view(rows, -1, 2, pieces.apart)
    return pieces._replace(numbers=pairs.flip(-2).reshape(rows, columns)).values()


def _in_word_order(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] with eight rows at a time in a word's order."""
    rows, columns = pieces.numbers.shape
    eights = pieces.numbers.view(rows // 8, 8, columns)
    inverse = torch.tensor(AWQ_PLACES).argsort()
    return pieces._replace(numbers=eights[:, inverse].reshape(rows, columns)).values()


def _as_they_lie(pieces: Pieces) -> torch.Tensor:
    """Return the values [row, column] as if groups lay in a row."""
    return pieces._replace(order=None).values()


FAULT = unpacked_as(
    "packed_nibble_order",
    "the two four-bit numbers of each byte were unpacked in the wrong order",
    _exchanged,
    ("INT4", "MXFP4", "NVFP4", *IN_NIBBLES),
)
_OTHERS = (
    unpacked_as(
        "packed_awq_order",
        "the eight numbers of each AWQ word were unpacked without their order, 0 4 1 5 2 6 3 7",
        _in_word_order,
        ("INT4",),
    ),
    unpacked_as(
        "packed_order_ignored",
        "the act-order (g_idx) of the weights was ignored",
        _as_they_lie,
        INTEGERS,
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
