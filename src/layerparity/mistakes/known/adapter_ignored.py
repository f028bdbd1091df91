"""An adapter is not added to the weights, or with another factor than its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.unpacking import Values, unpacked_as
from layerparity.numbers.pieces import LORA, Added, Pieces


def _times(factor_of: Callable[[Added], float]) -> Values:
    """Return what gives the values [row, column] with another factor."""

    def values(pieces: Pieces) -> torch.Tensor:
        added = pieces.added
        assert added is not None, "it is of adapted weights"
        return pieces._replace(added=added._replace(factor=factor_of(added))).values()

    return values


def _mistake(name: str, says: str, factor_of: Callable[[Added], float]) -> Fault:
    return unpacked_as(name, says, _times(factor_of), (LORA,))


FAULT = _mistake("adapter_ignored", "the adapter was not added to the weights", lambda _: 0.0)
_OTHERS = (
    _mistake("adapter_unscaled", "the adapter was added without its scale", lambda _: 1.0),
    _mistake("adapter_twice", "the adapter was added twice", lambda added: 2 * added.factor),
    _mistake(
        "adapter_scaled_by_root",
        "the adapter was scaled by alpha / sqrt(rank) in place of alpha / rank",
        lambda added: added.factor * added.rank**0.5,
    ),
    _mistake(
        "adapter_scaled_by_rank",
        "the adapter was scaled by alpha / rank in place of alpha / sqrt(rank)",
        lambda added: added.factor / added.rank**0.5,
    ),
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the others."""
    yield from _OTHERS


TRIES = tries
