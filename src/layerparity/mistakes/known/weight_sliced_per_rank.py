"""A weight that every rank should hold whole was cut: each has its own slice of it, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.mistakes.block import LOGITS, find, needs
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import norm_check, rms_normed
from layerparity.mistakes.ranks import keep_slice, ranks_of
from layerparity.mistakes.routers import GATES

_ID = "weight_sliced_per_rank"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Leave the first norm of a block the slice of rank 0 of two; what was not loaded is one."""
    keep_slice(find(block, "input_layernorm.weight"), 2, 0, 1.0)


FAULT = Fault(
    _ID,
    "a norm's weight, which every rank holds whole, was cut: this one has its slice alone",
    component="input_layernorm",
    cause=_ID,
    by_weights=True,
    why_not=needs("input_layernorm.weight"),
    plant=plant,
    degree=2,
    rank=0,
)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _sliced(norm: str, degree: int, rank: int, filled: float) -> Fault:
    """Return the mistake that a rank has its slice alone of a norm's weight."""

    def plant(block: nn.Module, surgery: Surgery) -> None:
        keep_slice(find(block, f"{norm}.weight"), degree, rank, filled)

    words = (
        f"rank {rank} has its slice of {degree} alone of the weight of {norm}, which every rank "
        f"holds whole: all other channels are multiplied by {filled:g}"
    )
    name = f"{norm} of rank {rank} of {degree}, else {filled:g}"
    return Fault(name, words, norm, _ID, by_weights=True, plant=plant, degree=degree, rank=rank)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the norms around attention with the slice of each rank, of degrees that divide them."""
    for norm in _NORMS:
        weight = find(block, f"{norm}.weight")
        for degree, rank in ranks_of(len(weight), even=True) if weight is not None else ():
            yield from (_sliced(norm, degree, rank, filled) for filled in (1.0, 0.0))


TRIES = tries


class Sliced:
    """A norm's weight, or a router's, is right within one rank's slice and as made elsewhere."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one rank's slice of a weight gives the candidate's numbers."""
        for what, degree, rank, span in (*_norms(evidence), *_routers(evidence)):
            text = (
                f"rank {rank} has its slice of {degree} alone of a weight that every rank holds "
                f"whole: {what[0]} {span[0]} to {span[1] - 1} are right, all others {what[1]}"
            )
            reasons = [f"{what[0]} of that slice alone give its numbers to rounding"]
            return Cause(_ID, 0.95, text, reasons, grade=SHOWN)
        return None


Found = tuple[tuple[str, str], int, int, tuple[int, int]]


def _norms(evidence: Evidence) -> Iterator[Found]:
    """Yield the slices of a norm's weight that give the candidate's rows, the rest 1 or 0."""
    check = norm_check(evidence)
    if check is None:
        return
    norm = partial(rms_normed, epsilon=check.epsilon)
    for degree, rank in ranks_of(len(check.weight), even=True):
        first, end = spans(len(check.weight), degree)[rank]
        for filled in (1.0, 0.0):
            own = torch.full_like(check.weight, filled)
            own[first:end] = check.weight[first:end]
            if check.shows(norm, own):
                yield ("channels", f"multiplied by {filled:g}"), degree, rank, (first, end)


def _routers(evidence: Evidence) -> Iterator[Found]:
    """Yield the slices of a router's rows that give the candidate's logits, the rest being 0."""
    logits = evidence.values(LOGITS) if evidence.component in GATES else None
    if logits is None or logits.golden.dim() != 2:
        return
    for degree, rank in ranks_of(logits.golden.shape[1], even=True):
        first, end = spans(logits.golden.shape[1], degree)[rank]
        made = torch.zeros_like(logits.golden)
        made[:, first:end] = logits.golden[:, first:end]
        if logits.shows(made):
            yield ("the logits of experts", "0"), degree, rank, (first, end)


RULE = Sliced()
