"""Faults that nobody has had yet: a kind and a nominal size, and how one is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from layerparity.mistakes.fault import ChangeArguments, Fault, Plant, WhyNot, everywhere, nothing
from layerparity.mistakes.parts import Part

# Relative errors of a weight or a constant, by which slips are made.
SIZES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
# Weights whose rows belong to heads; the columns of ``self_attn.o_proj`` do.
HEAD_ROWS = tuple(
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
)
HEAD_COLUMNS = "self_attn.o_proj"


@dataclass(frozen=True, kw_only=True)
class Mutation(Fault):
    """A fault with a kind and a nominal size.

    ``kind`` is ``constant``, ``precision``, ``swap``, ``shift``, ``scale``, ``slip``, or one of the
    corpus. ``size`` is the relative change of what was hit: 0.01 for a slip of 1 %, 1 for what is
    replaced or lost. ``true`` are the rules, by name, whose sentence is true of it.
    """

    kind: str
    size: float
    true: tuple[str, ...] = ()


def mutation(
    kind: str,
    story: str,
    component: str,
    *,
    size: float,
    why_not: WhyNot = everywhere,
    plant: Plant = nothing,
    arguments: ChangeArguments | None = None,
    by_weights: bool = False,
    never_loaded: tuple[str, ...] = (),
    true: tuple[str, ...] = (),
) -> Mutation:
    """Return a mutation of a block, or of its arguments; its words are its id, spaces dashed."""
    return Mutation(
        id=f"{kind} {story}".replace(" ", "-"),
        story=story,
        component=component,
        cause=kind,
        by_weights=by_weights,
        why_not=why_not,
        plant=plant,
        arguments=arguments,
        kind=kind,
        never_loaded=never_loaded,
        size=size,
        true=true,
    )


def of_weight(
    kind: str,
    story: str,
    part: Part,
    *,
    size: float,
    place: tuple[int, int, int],
    plant: Plant,
    true: tuple[str, ...] = (),
) -> Mutation:
    """Return a mutation of one weight; ``place`` is the last (expert, row, column) it touches.

    ``true`` are the rules that are true of it beside that of altered weights.
    """

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return part.fits(block, *place)

    return mutation(
        kind,
        story,
        part.component,
        size=size,
        why_not=why_not,
        plant=plant,
        by_weights=True,
        true=("weights_altered", *true),
    )
