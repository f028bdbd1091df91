"""Hypotheses: the mistakes that are planted in a golden's block to see whose numbers they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from torch import nn

from layerparity.ground import registry
from layerparity.mistakes.catalogue import KNOWN, catalogue, known_fault
from layerparity.mistakes.fault import BLOCK, Fault

# What a known bug's file may hold beside its ``FAULT``: other mistakes that its cause is true of.
Tries = Callable[[nn.Module], Iterator[Fault]]


def hypotheses(block: nn.Module) -> list[Fault]:
    """Return the known faults, and what known bugs' files try beside them, on a block.

    The files take turns: where time runs out, each has had some of its own tried.
    """
    tries: list[Tries] = [
        registry.load(KNOWN, name).TRIES for name in registry.holding(KNOWN, "TRIES")
    ]
    known = (fault for fault in map(known_fault, catalogue()) if fault.stage == BLOCK)
    turns = zip_longest(*(make(block) for make in tries))
    return [*known, *(each for turn in turns for each in turn if each is not None)]
