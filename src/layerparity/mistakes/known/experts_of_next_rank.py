"""One rank holds the experts of the next: its slice was cut out of the weights one too far."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Fault, Plant, Surgery
from layerparity.mistakes.ranks import ranks_of, shift_experts

_PATH, _CAUSE = "mlp.experts", "experts_of_next_rank"


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, f"{_PATH}.down_proj")
    uneven = not gone and len(find(block, f"{_PATH}.down_proj")) % 2
    return gone or ("the experts are not shared evenly by two ranks" if uneven else "")


def _plant(block: nn.Module, surgery: Surgery, degree: int, rank: int) -> None:
    shift_experts(block, degree, rank)


def _shifted(degree: int, rank: int, number: int = 0) -> Fault:
    """Return the mistake that a rank's experts are the next rank's; of ``number`` in all."""
    shares = spans(number, degree)
    which = f" (experts {shares[rank][0]} to {shares[rank][1] - 1})" if number else ""
    words = f"rank {rank} of {degree}{which} holds the experts of rank {(rank + 1) % degree}"
    plant: Plant = partial(_plant, degree=degree, rank=rank)
    return Fault(f"experts of rank {rank} of {degree}", words, _PATH, _CAUSE, True, plant=plant)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield each rank's experts shifted, of all degrees that divide their number."""
    if lacking(block, f"{_PATH}.down_proj"):
        return
    number = len(find(block, f"{_PATH}.down_proj"))
    for degree, rank in ranks_of(number, even=True):
        if (degree, rank) != (2, 0):
            yield _shifted(degree, rank, number)


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
)
