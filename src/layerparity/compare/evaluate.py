"""Evaluate: the numbers of one site, from two stored tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from layerparity.compare.align import Pair
from layerparity.compare.rows import by_token, chunks, has_tokens, real_tokens
from layerparity.compare.sides import Found, Union
from layerparity.errors import UserError
from layerparity.metrics.base import FLOATING, Chunk, Stream
from layerparity.metrics.set_agreement import sets_agree
from layerparity.site import PREFILL, Kind, Site

CHOICES, WEIGHTS = "choices", "weights"
NONE_AGREES = "no token's expert set agrees"
NOTHING = "no element to compare"


@dataclass
class Measured:
    """A site's metrics by name, relative L2 error of each real token, and why there are none."""

    metrics: dict[str, float] = field(default_factory=dict)
    token_errors: list[float] = field(default_factory=list)
    nothing: str = ""


def measure(pair: Pair, golden: Union, candidate: Union) -> Measured:
    """Return a pair's metrics over its real tokens; tensors are read, checked and let go.

    Routing weights are compared at the tokens whose expert sets agree. Raises UserError where the
    golden holds NaN or Inf, or a tensor is damaged.
    """
    left, right = _load(pair.golden), _load(pair.candidate)
    axes, mask = pair.golden.record.axes, _mask(pair)
    routed = pair.site.end == WEIGHTS and pair.kind is Kind.REAL
    if routed:
        mask = _agreeing(pair.site, golden, candidate, mask)
    if mask is not None and has_tokens(axes) and by_token(left, axes).shape[:2] != mask.shape:
        return Measured(nothing=f"attention mask {list(mask.shape)} against {list(left.shape)}")
    stream, errors, broken = Stream(pair.kind), [], 0
    for chunk in chunks(left, right, axes, mask):
        stream.feed(chunk)
        broken += _nonfinite(chunk) if pair.kind in FLOATING else 0
        if has_tokens(axes) and left.is_floating_point() and not routed:
            errors += token_errors(chunk)
    if broken:
        raise UserError(_unbelievable(pair, broken))
    if not stream.elements:
        return Measured(nothing=NONE_AGREES if routed else NOTHING)
    return Measured(stream.results(), errors)


def token_errors(chunk: Chunk) -> list[float]:
    """Return ||c - g|| / ||g|| of each row of a [tokens, width] chunk, to six digits.

    0 where both rows are zero; Inf where only the golden's is, or a value is not finite.
    """
    rows = chunk.golden.shape[0]
    if chunk.finite is None:
        diff, golden = chunk.diff.view(rows, -1), chunk.golden64.view(rows, -1)
    else:
        golden = chunk.golden.double().view(rows, -1)
        diff = chunk.candidate.double().view(rows, -1) - golden
    error = torch.linalg.vector_norm(diff, dim=1)
    ratio = error / torch.linalg.vector_norm(golden, dim=1)
    ratio[error == 0] = 0.0
    return _short(ratio.nan_to_num(nan=math.inf, posinf=math.inf).tolist())


def _short(values: Iterable[float]) -> list[float]:
    # A comparison holds one for every token of every site: six digits keep its file readable.
    return [float(f"{value:.6g}") for value in values]


def _nonfinite(chunk: Chunk) -> int:
    """Count the golden's values that are NaN or Inf."""
    if chunk.finite is None:
        return 0
    return int(torch.count_nonzero(~torch.isfinite(chunk.golden)))


def _load(found: Found) -> torch.Tensor:
    return found.source.load(found.record)


def _mask(pair: Pair) -> torch.Tensor | None:
    """Return which tokens are real, or None for all; a decode step has no padding."""
    if pair.site.phase != PREFILL:
        return None
    mask = pair.golden.source.mask
    return pair.candidate.source.mask if mask is None else mask


def _agreeing(
    site: Site, golden: Union, candidate: Union, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Narrow a token mask to the tokens that both sides send to the same experts."""
    choices = Site(site.path, CHOICES, site.phase, site.step)
    left, right = golden.records.get(choices), candidate.records.get(choices)
    if left is None or right is None or left.record.shape != right.record.shape:
        return mask
    if not has_tokens(left.record.axes):
        return mask
    g, c = (by_token(_load(found), left.record.axes) for found in (left, right))
    real, agree = real_tokens(g, mask), sets_agree(g, c)
    return real & agree if real.shape == agree.shape else mask


def _unbelievable(pair: Pair, count: int) -> str:
    return (
        f"The golden '{pair.golden.source.run.name}' has {count} NaN or Inf at {pair.site}: "
        "it cannot be believed; make a new golden run."
    )
