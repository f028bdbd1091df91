"""One rank holds the experts of the next: its slice was cut out of the weights one too far."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Fault, Plant, Surgery
from layerparity.mistakes.ranks import (
    expert_width,
    ranks_of,
    shift_experts,
    shift_width,
    turn_experts,
)

_PATH, _CAUSE = "mlp.experts", "experts_of_next_rank"


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, f"{_PATH}.down_proj")
    uneven = not gone and len(find(block, f"{_PATH}.down_proj")) % 2
    return gone or ("the experts are not shared evenly by two ranks" if uneven else "")


def _by_number(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    shift_experts(block, degree, rank)


def _by_width(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    shift_width(block, degree, rank)


def _turned(block: nn.Module, surgery: Surgery, degree: int, rank: int, by: int) -> None:
    turn_experts(block, degree, rank, by)


def _fault(what: str, words: str, plant: Plant, degree: int, rank: int) -> Fault:
    # Weights that are right may be used for another expert's: they do not refute it.
    name = f"{what} of rank {rank} of {degree}"
    return Fault(name, words, _PATH, _CAUSE, plant=plant, degree=degree, rank=rank)


def _shifted(degree: int, rank: int, number: int = 0) -> Fault:
    """Return the mistake that a rank's experts are the next rank's; of ``number`` in all."""
    shares = spans(number, degree)
    which = f" (experts {shares[rank][0]} to {shares[rank][1] - 1})" if number else ""
    words = f"rank {rank} of {degree}{which} holds the experts of rank {(rank + 1) % degree}"
    plant: Plant = partial(_by_number, degree=degree, rank=rank)
    return _fault("experts", words, plant, degree, rank)


def _of_width(degree: int, rank: int) -> Iterator[Fault]:
    """Yield what may be wrong with the part of every expert's width that a rank holds."""
    own = f"rank {rank} of {degree}, which holds a part of every expert's width, has"
    plant: Plant = partial(_by_width, degree=degree, rank=rank)
    words = f"{own} that of rank {(rank + 1) % degree}"
    yield _fault("next width", words, plant, degree, rank)
    for by, other in ((1, "before"), (-1, "after")):
        plant = partial(_turned, degree=degree, rank=rank, by=by)
        yield _fault(f"expert {other}", f"{own} that of the expert {other}", plant, degree, rank)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield each rank's experts shifted, of all degrees that divide their number or width."""
    if lacking(block, f"{_PATH}.down_proj"):
        return
    number = len(find(block, f"{_PATH}.down_proj"))
    for degree, rank in ranks_of(number, even=True):
        if (degree, rank) != (2, 0):
            yield _shifted(degree, rank, number)
    for degree, rank in ranks_of(expert_width(find(block, _PATH)), even=True):
        yield from _of_width(degree, rank)


TRIES = tries
_FIRST = _shifted(2, 0)
FAULT = Fault(
    "experts_of_next_rank",
    _FIRST.story,
    component=_PATH,
    cause=_CAUSE,
    by_weights=True,
    why_not=why_not,
    plant=_FIRST.plant,
    degree=_FIRST.degree,
    rank=_FIRST.rank,
)
