"""What the ranks' parts of o_proj give is not added up: one rank's partial sum goes on alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.ranks import OF_OTHERS, heads_of, o_proj_span, part_of, ranks_of, replace

_PATH = "self_attn.o_proj"


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, f"{_PATH}.weight")
    if gone:
        return gone
    heads, width = heads_of(block)[0], find(block, f"{_PATH}.weight").shape[-1]
    return "" if heads > 1 and width % heads == 0 else "o_proj has no heads to share"


def _alone(degree: int, rank: int) -> Fault:
    """Return the mistake that one rank's heads alone go through o_proj."""

    def plant(block: nn.Module, surgery: Surgery) -> None:
        span = o_proj_span(block, degree, rank)
        replace(block, surgery, _PATH, part_of(find(block, _PATH), span))

    words = (
        f"o_proj gives rank {rank}'s partial sum of {degree} alone: the sum over the ranks "
        "(all-reduce) is missing"
    )
    name = f"o_proj of rank {rank} of {degree}"
    cause = "attention_not_reduced"
    return Fault(
        name,
        words,
        _PATH,
        cause,
        why_not=why_not,
        plant=plant,
        degree=degree,
        refuted_by=OF_OTHERS,
    )


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield each rank's partial sum, of all degrees that the heads can be shared by."""
    if why_not(block, torch.float32, ""):
        return
    for degree, rank in ranks_of(heads_of(block)[0]):
        first, end = o_proj_span(block, degree, rank)
        if (degree, rank) != (2, 0) and end > first:
            yield _alone(degree, rank)


TRIES = tries
_FIRST = _alone(2, 0)
FAULT = Fault(
    "attention_not_reduced",
    _FIRST.story,
    component=_PATH,
    cause="attention_not_reduced",
    why_not=why_not,
    plant=_FIRST.plant,
    degree=_FIRST.degree,
    refuted_by=OF_OTHERS,
)
