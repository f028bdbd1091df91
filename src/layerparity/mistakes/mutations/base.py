"""Mutation: a fault that nobody has had yet, drawn at random, with the size it was given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from layerparity.mistakes.fault import Applies, Apply, Fault
from layerparity.mistakes.parts import Part


@dataclass(frozen=True, kw_only=True)
class Mutation(Fault):
    """A fault with a kind and a nominal size.

    ``kind`` is ``constant``, ``precision``, ``swap``, ``shift``, ``scale`` or ``slip``. ``size`` is
    the relative change of what was hit: 0.01 for a slip of 1 %, 1 for what is replaced or lost.
    """

    kind: str
    size: float

    @property
    def label(self) -> str:
        """What it does, in words."""
        return self.story


def mutation(
    kind: str,
    story: str,
    component: str,
    *,
    size: float,
    applies: Applies,
    apply: Apply,
    by_weights: bool = False,
) -> Mutation:
    """Return a mutation that changes a block; its words are its id, spaces dashed."""
    return Mutation(
        id=f"{kind} {story}".replace(" ", "-"),
        story=story,
        component=component,
        cause=kind,
        by_weights=by_weights,
        applies=applies,
        apply=apply,
        kind=kind,
        size=size,
    )


def of_weight(
    kind: str,
    story: str,
    part: Part,
    *,
    size: float,
    place: tuple[int, int, int],
    apply: Apply,
) -> Mutation:
    """Return a mutation of one weight; ``place`` is the last (expert, row, column) it touches."""

    def applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return part.fits(block, *place)

    return mutation(
        kind, story, part.component, size=size, applies=applies, apply=apply, by_weights=True
    )
