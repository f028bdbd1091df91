"""What the ranks' experts, or parts of an MLP, give is not added up: one rank's goes on alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.mistakes.block import find, lacking, needs
from layerparity.mistakes.fault import Fault, Plant, Surgery
from layerparity.mistakes.ranks import (
    OF_OTHERS,
    expert_width,
    number_of,
    part_of,
    ranks_of,
    replace,
    width_of,
)

_CAUSE, _EXPERTS, _DOWN = "experts_not_reduced", "mlp.experts", "mlp.down_proj"
_MISSING = "the sum over the ranks (all-reduce) is missing"


def _by_width(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    experts = find(block, _EXPERTS)
    span = spans(expert_width(experts), degree)[rank]
    replace(block, surgery, _EXPERTS, width_of(experts, span, rank == 0))


def _by_number(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    span = spans(len(find(block, f"{_EXPERTS}.down_proj")), degree)[rank]
    surgery.wrap(find(block, _EXPERTS), partial(number_of, span))


def _dense(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    module = find(block, _DOWN)
    span = spans(module.weight.shape[1], degree)[rank]
    replace(block, surgery, _DOWN, part_of(module, span))


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield each rank's partial sum of a block's experts, by number and width, or of its MLP."""
    if not lacking(block, f"{_EXPERTS}.down_proj"):
        for degree, rank in ranks_of(len(find(block, f"{_EXPERTS}.down_proj"))):
            if (degree, rank) != (2, 0):
                yield _alone("experts by number", _EXPERTS, degree, rank)
        for degree, rank in ranks_of(expert_width(find(block, _EXPERTS))):
            yield _alone("experts by width", _EXPERTS, degree, rank)
    elif not lacking(block, f"{_DOWN}.weight"):
        for degree, rank in ranks_of(find(block, f"{_DOWN}.weight").shape[1]):
            yield _alone("down_proj", "mlp", degree, rank)


_WAYS = {"experts by number": _by_number, "experts by width": _by_width, "down_proj": _dense}


def _alone(what: str, component: str, degree: int, rank: int) -> Fault:
    """Return the mistake that one rank's share goes on alone."""
    plant: Plant = partial(_WAYS[what], degree=degree, rank=rank)
    shared = what.replace("experts", "experts shared")
    words = f"rank {rank}'s partial sum of {degree} goes on alone ({shared}): {_MISSING}"
    name = f"{what} of rank {rank} of {degree}"
    return Fault(name, words, component, _CAUSE, plant=plant, degree=degree, refuted_by=OF_OTHERS)


TRIES = tries
_FIRST = _alone("experts by number", _EXPERTS, 2, 0)
FAULT = Fault(
    "experts_not_reduced",
    _FIRST.story,
    component=_EXPERTS,
    cause=_CAUSE,
    why_not=needs(f"{_EXPERTS}.down_proj"),
    plant=_FIRST.plant,
    degree=_FIRST.degree,
    refuted_by=OF_OTHERS,
)
