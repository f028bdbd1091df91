"""Streaming: whether a model's stages, one after the other, fit the memory there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from layerparity.console import bytes_text
from layerparity.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

STREAM = "stream"
# What a run takes beside its weights: stacks of its threads, scratch, what flows between stages.
WORK = 256 << 20
# XLA:CPU's device is the host: while weights move, both hold them, and then what is fetched for
# their prints. Measured at 2.3.
STAND_IN_COPIES = 2.5


def room_for_weights(free: int, beside: int = 0) -> int:
    """Return what is left of ``free`` bytes for weights; ``beside`` is what is known to be held."""
    return max(0, free - WORK - beside)


def widest_copy(modules: Iterable[nn.Module], dtype: torch.dtype) -> int:
    """Return the bytes of the largest weight in ``dtype``, as a reference widens it to multiply.

    Stacked experts are widened one at a time, and an embedding is looked up as it is.
    """
    from torch import nn

    linear = (each for module in modules for each in module.modules() if type(each) is nn.Linear)
    return max((each.weight.numel() for each in linear), default=0) * dtype.itemsize


def reads_ahead(
    sizes: Mapping[str, int], free: int, where: str = "memory", *, again: bool = False
) -> bool:
    """Say whether the next stage can be read while one computes.

    ``sizes`` are bytes by stage in running order, ``free`` what may be taken; ``again`` says that
    the first stage comes after the last, for another token. Raises UserError, saying how much is
    needed, where one stage alone does not fit.
    """
    largest = max(sizes, key=lambda stage: sizes[stage])
    if sizes[largest] > free:
        raise UserError(
            f"{largest} alone needs {bytes_text(sizes[largest])} for its weights, and {where} has "
            f"{bytes_text(free)} left: raise the limit (max_memory=, ulimit, container) to at "
            "least that, or leave that stage out with scope=."
        )
    return most_at_once(sizes, again) <= free


def most_at_once(sizes: Mapping[str, int], again: bool = False) -> int:
    """Return the bytes of the two neighbouring stages that are largest together."""
    return sum(sizes[stage] for stage in largest_together(sizes, again))


def largest_together(sizes: Mapping[str, int], again: bool = False) -> tuple[str, ...]:
    """Return the two neighbouring stages that are largest together, or the only stage there is."""
    order = list(sizes)
    pairs = pairwise([*order, *order[:1]] if again else order)
    return max(pairs, key=lambda pair: sum(sizes[stage] for stage in pair), default=tuple(order))


def told(sizes: Mapping[str, int], ahead: bool, again: bool = False) -> str:
    """Return how the stages stream, for the user."""
    total = bytes_text(sum(sizes.values()))
    if ahead:
        two = bytes_text(most_at_once(sizes, again))
        held = f"at most two in memory, {two}; the next is read ahead"
    else:
        held = f"one in memory, at most {bytes_text(max(sizes.values()))}; nothing is read ahead"
    return f"streaming {len(sizes)} stages ({total}): {held}."
