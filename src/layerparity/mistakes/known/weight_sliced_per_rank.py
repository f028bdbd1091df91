"""A weight that every rank should hold whole was cut: each has its own slice of it, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.anatomy.site import within
from layerparity.mistakes.block import LOGITS, find, needs
from layerparity.mistakes.cause import SHOWN, WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import norm_check, own_weight, rms_normed
from layerparity.mistakes.ranks import keep_slice, ranks_of
from layerparity.mistakes.routers import GATES
from layerparity.numbers.rank_parts import left_with
from layerparity.record.weights import Fate

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
        """Return the cause where one rank's slice of a weight gives the candidate's numbers.

        Where a rank's weights were looked at, they say it: they hold the slice to the bit.
        """
        for found in (*_norms(evidence), *_routers(evidence), *_exchanged(evidence)):
            reasons = [f"{found.what} to rounding"]
            return Cause(_ID, found.text, reasons, grade=SHOWN)
        own = (each for each in evidence.blamed if each.fate is Fate.SLICED)
        cut = next((each for each in own if within(each.component, evidence.component)), None)
        if cut is None:
            return None
        first, last, length = (int(cut.numbers[name]) for name in ("first", "last", "length"))
        degree = evidence.fact("tp_degree", 1)
        rank = spans(length, degree).index((first, last + 1))
        text = (
            f"rank {rank} has its slice of {degree} alone of "
            f"{cut.name}, which every rank holds whole: of {length} positions {first} to {last} "
            "are the checkpoint's"
        )
        reasons = ["that slice is the checkpoint's to the bit, so the weight was loaded"]
        return Cause(_ID, text, reasons, findings=[cut], grade=WEIGHTS)


@dataclass(frozen=True)
class _Found:
    """The slice that was found; ``what`` says what gives the candidate's numbers."""

    what: str
    text: str


def _alone(what: str, degree: int, rank: int, span: tuple[int, int], others: str) -> _Found:
    text = (
        f"rank {rank} has its slice of {degree} alone of a weight that every rank holds whole: "
        f"{what} {span[0]} to {span[1] - 1} are right, all others {others}"
    )
    return _Found(f"{what} of that slice alone give its numbers", text)


def _norms(evidence: Evidence) -> Iterator[_Found]:
    """Yield the slices of a norm's weight that give the candidate's rows."""
    check = norm_check(evidence)
    if check is None:
        return
    norm = partial(rms_normed, epsilon=check.epsilon)
    # Then nothing of the weight came, and a slice of some ones or zeros would say as much.
    if any(check.shows(norm, torch.full_like(check.weight, each)) for each in (1.0, 0.0)):
        return
    for degree, rank in ranks_of(len(check.weight), even=True):
        span = spans(len(check.weight), degree)[rank]
        for others, own in left_with(check.weight, *span):
            if check.shows(norm, own):
                yield _alone("channels", degree, rank, span, f"multiplied by {others}")


def _exchanged(evidence: Evidence) -> Iterator[_Found]:
    """Yield the rank that norms its own channels by another rank's slice of the weight."""
    check, degree = norm_check(evidence), evidence.fact("tp_degree", 1)
    if check is None or degree < 2 or len(check.weight) % degree:
        return
    norm = partial(rms_normed, epsilon=check.epsilon)
    parts = check.weight.chunk(degree)
    errors = [
        float((own - right).norm() / right.norm().clamp(min=1e-300))
        for own, right in zip(own_weight(check).chunk(degree), parts, strict=True)
    ]
    rank = max(range(degree), key=errors.__getitem__)
    for other in set(range(degree)) - {rank}:
        own = torch.cat([*parts[:rank], parts[other], *parts[rank + 1 :]])
        if check.shows(norm, own):
            text = f"rank {rank} of {degree} has rank {other}'s slice of the weight for its own"
            yield _Found("the golden's weight with that slice in its place gives its numbers", text)


def _routers(evidence: Evidence) -> Iterator[_Found]:
    """Yield the slices of a router's rows that give the candidate's logits."""
    logits = evidence.values(LOGITS) if evidence.component in GATES else None
    if logits is None or logits.golden.dim() != 2:
        return
    for degree, rank in ranks_of(logits.golden.shape[1], even=True):
        span = spans(logits.golden.shape[1], degree)[rank]
        for others, made in left_with(logits.golden.T, *span):
            # Nothing of a weight but zeros gives logits that are one number.
            if others != "1" and logits.shows(made.T):
                yield _alone("the logits of experts", degree, rank, span, others)


RULE = Sliced()
