"""Mutations: faults that no rule was written for, drawn by a seed over site, kind and size."""

from __future__ import annotations

from random import Random

from torch import nn

from judging.mutations.base import Mutation
from judging.mutations.constants import constants
from judging.mutations.modules import precision
from judging.mutations.shifts import shifts
from judging.mutations.weights import scales, slips, swaps
from layerparity.ground.errors import UserError

KINDS = (slips, constants, precision, swaps, shifts, scales)

__all__ = ["KINDS", "Mutation", "every_mutation", "mutations"]


def mutations(seed: int, count: int, block: nn.Module) -> list[Mutation]:
    """Return the first ``count`` of all that are drawn. Raises UserError where there are fewer."""
    drawn = every_mutation(seed, block)
    if len(drawn) < count:
        raise UserError(f"There are {len(drawn)} mutations of such a block, not {count}.")
    return drawn[:count]


def every_mutation(seed: int, block: nn.Module) -> list[Mutation]:
    """Return the distinct mutations of a block, which may be on the meta device.

    Kinds take turns until theirs are used up, each in random order.
    """
    draw = Random(seed)
    queues = []
    for kind in KINDS:
        unique = list({each.id: each for each in kind(draw, block)}.values())
        draw.shuffle(unique)
        queues.append(unique)
    drawn: list[Mutation] = []
    while any(queues):
        drawn += [queue.pop() for queue in queues if queue]
    return drawn
