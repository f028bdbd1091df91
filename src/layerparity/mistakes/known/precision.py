"""precision: a part is computed in a narrower type than the golden's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from layerparity.ground.numeral import numeral, percent
from layerparity.mistakes.block import CHOICES, LOGITS, WEIGHTS
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.kernels import core_of
from layerparity.mistakes.norms import norm_check, one_factor_a_row
from layerparity.mistakes.rounded_inputs import rounding_inputs
from layerparity.mistakes.routers import GATES, SCORES, routing_of
from layerparity.numbers.arithmetic import Operation
from layerparity.numbers.operands import CACHE, PACKED, ROUNDED, Operands

# The types that a tensor's numbers may all be of, the narrowest first.
_NARROW = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
# What the factor of a norm is off by where its variance is computed in bfloat16, and the least.
_COARSE, _LEAST = 2.0**-6, 2.0**-12
# Fewer numbers are no computation that was rounded.
_VARIED = 32
# What a hypothesis may leave of an error, where some roundings go the other way.
_EXPLAINED = 0.1
# Of numbers less than that part of their mean, what they are made of is off by many steps.
_SMALL = 0.25
# What numbers that are cut lack of a step on average, by how many standard errors that is shown,
# by how many it may be missed, and what an error of rounding stays below, in steps.
_CUT, _SURE, _NEAR, _ROUNDINGS = 0.5, 4.0, 3.0, 3.0


class Precision:
    """All numbers are of a narrower type, or are what such a one gives."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where what is left is rounding of a coarser type."""
        narrow = _narrower(evidence)
        if narrow:
            text = f"a part is computed in, or rounded to, a narrower type: {narrow}"
            reasons = [f"every number of the candidate is one of {narrow}, and the golden's not"]
            return Cause("precision", text, reasons, grade=SHOWN)
        coarse = (_coarse_norm, _coarse_router, _coarse_attention, _cut)
        return next(filter(None, (each(evidence) for each in coarse)), None)


def _narrower(evidence: Evidence) -> str:
    """Return the type that all of the candidate's numbers are of and the golden's are not."""
    own = evidence.values(evidence.local)
    if own is None or len(own.candidate.unique()) < _VARIED or not own.candidate.isfinite().all():
        return ""
    off = (own.candidate - own.golden).norm() / own.golden.norm()
    for kind in _NARROW:
        if torch.finfo(kind).eps <= own.step:
            continue
        held, right = (
            bool((each.clamp(-most, most).to(kind).double() == each).all())
            for most in [torch.finfo(kind).max]
            for each in (own.candidate, own.golden)
        )
        # Numbers that were rounded alone are no further than that from what they were.
        if held and not right and off < torch.finfo(kind).eps:
            return str(kind).removeprefix("torch.")
    return ""


def _coarse_norm(evidence: Evidence) -> Cause | None:
    """Return the cause where a norm is right but for a small factor a token, up and down."""
    check = norm_check(evidence)
    if check is None or not one_factor_a_row(check):
        return None
    away = (check.factors - 1).flatten()
    largest = float(away.abs().max())
    both = float(away.min()) < -_LEAST < _LEAST < float(away.max())
    if not _LEAST < largest < _COARSE or not both:
        return None
    text = "the norm's variance, or its root, is computed in a narrower type"
    reasons = [f"each token is right but for a factor of its own, up to {percent(largest)} off"]
    return Cause("precision", text, reasons, grade=SHOWN)


def _coarse_router(evidence: Evidence) -> Cause | None:
    """Return the cause where the weights of chosen experts are divided in the run's narrow type."""
    narrow = getattr(torch, evidence.facts.get("dtype", ""), None)
    if narrow not in _NARROW or evidence.component not in GATES or evidence.local != WEIGHTS:
        return None
    stored = [evidence.values(local) for local in (LOGITS, CHOICES, WEIGHTS)]
    routing = routing_of(evidence)
    if any(each is None for each in stored) or routing is None or routing.golden is None:
        return None
    if not routing.golden.divided:
        # The model divides by no sum: that there is a division is what is wrong.
        return None
    logits, choices, weights = (each.candidate for each in stored if each is not None)
    chosen, seen = choices.long(), evidence.values(WEIGHTS)
    assert seen is not None
    for name, score in SCORES.items():
        exact = score(logits).gather(-1, chosen)
        own = exact.to(narrow)
        if weights.shape != own.shape or seen.shows(exact / exact.sum(-1, keepdim=True)):
            # What a division in float32 gives as well says nothing of its type.
            continue
        if seen.shows((own / own.sum(-1, keepdim=True)).double()):
            kind = str(narrow).removeprefix("torch.")
            text = f"the chosen experts' weights are divided by their sum in {kind}, not in float32"
            reasons = [f"{name} of its own logits, divided in {kind}, gives its weights"]
            return Cause("precision", text, reasons, grade=SHOWN)
    return None


def _coarse_attention(evidence: Evidence) -> Cause | None:
    """Return the cause where scores or shares that are rounded to a narrow type give the context.

    A number between two neighbours of that type may go either way, so that a little is left.
    """
    core = core_of(evidence)
    if core is None:
        return None
    whole = max(float((core.context.candidate - core.context.golden).norm()), 1e-300)
    kinds = [each for each in _NARROW if torch.finfo(each).eps > core.context.step]
    left = sorted(
        (float((core.context.candidate - made).norm()) / whole, str(kind), what)
        for kind in kinds
        for what, made in core.narrowed(kind)
    )
    left = [each for each in left if math.isfinite(each[0])]
    if not left or left[0][0] > _EXPLAINED:
        return None
    kind = left[0][1].removeprefix("torch.")
    others = [each for each in left if each[1] == left[0][1] and each[0] <= 3 * _EXPLAINED]
    what = left[0][2] if len(others) == 1 else "a part of it"
    text = f"attention is computed in a narrower type: {what} in {kind}"
    reasons = [
        f"attention of its own queries, keys and values, {what} rounded to {kind}, gives its "
        f"numbers but for {percent(left[0][0])} of the error"
    ]
    return Cause("precision", text, reasons, grade=SHOWN)


def _cut(evidence: Evidence) -> Cause | None:
    """Return the cause where numbers lack half a step of their type, whatever share that is.

    A step is as large for all numbers between two powers of 2, of which a factor takes the less the
    smaller they are, and a constant the same of all. They are fitted at once: what is cut before
    lowers the result by a factor.
    """
    own = evidence.values(evidence.local)
    narrow = getattr(torch, evidence.facts.get("dtype", ""), None)
    if own is None or narrow not in _NARROW or not own.candidate.isfinite().all():
        return None
    eps, size = torch.finfo(narrow).eps, float(own.golden.square().mean().sqrt())
    # A prompt that is there twice says nothing twice.
    both = torch.stack([own.golden.flatten(1), own.candidate.flatten(1)], 1).unique(dim=0)
    large = both[:, 0].abs() > _SMALL * size
    golden, candidate = both[:, 0][large], both[:, 1][large]
    off = float((candidate - golden).norm()) / max(float(golden.norm()), 1e-300)
    if own.step != eps or not 0 < off < _ROUNDINGS * eps or len(golden) < _VARIED:
        return None
    step = torch.ldexp(torch.full_like(golden, eps), torch.frexp(golden).exponent - 1)
    lacks = (golden.abs() - candidate * golden.sign()) / step
    # What else differs is as large for all numbers, and more steps of a small one.
    sure = (1 + (candidate - golden).square().mean() / step.square()).rsqrt()
    others = (golden.abs() / step, size / step)
    terms = torch.stack([sure, *(sure * each for each in others)], 1)
    inverse = torch.linalg.pinv(terms.T @ terms, hermitian=True)
    found = inverse @ (terms.T @ (sure * lacks))
    left = float((sure * lacks - terms @ found).square().mean())
    error = math.sqrt(left * float(inverse[0, 0]))
    cut, share = found[:2].tolist()
    if cut < _SURE * error or abs(cut - _CUT) > max(_NEAR * error, 0.1) or abs(share) > _CUT * eps:
        return None
    kind = str(narrow).removeprefix("torch.")
    text = f"numbers are cut to {kind}, towards zero, and not rounded to the nearest"
    reasons = [
        f"large or small, they lack {numeral(cut, 2)} steps of {kind} on average (standard error "
        f"{numeral(error, 1)}): cutting takes half a step, rounding none, and a factor a share"
    ]
    return Cause("precision", text, reasons, grade=SHOWN)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield a block whose products round their operands; of a narrower type, coarse ones alone."""
    weight = next(block.parameters(), None)
    for name, how in ROUNDED.items():
        if how.of in (CACHE, PACKED) or (weight is not None and weight.dtype == torch.float32):
            yield _rounding(name)


def _rounding(operands: str) -> Fault:
    def around(exact: Operation) -> Operation:
        def forward(*args: object, **named: object) -> object:
            with Operands(operands):
                return exact(*args, **named)

        return forward

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(block, rounding_inputs(block, surgery, dict) if of == PACKED else around)

    of = ROUNDED[operands].of
    does = {
        CACHE: f"keys and values are kept as {operands}",
        PACKED: "activations are quantised before products, as config.json says",
    }.get(of, f"products round their operands to {operands}")
    words = f"{does}; where that is meant, operands=[{operands}] judges by it"
    return Fault(
        f"{operands} operands",
        words,
        component="",
        cause="precision",
        of_inputs=bool if of == PACKED else None,
        coarse=of in (CACHE, PACKED),
        plant=plant,
    )


RULE = Precision()
TRIES = tries
