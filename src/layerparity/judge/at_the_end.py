"""At the end: what reviewers quote of a pair's logits, and each number over that of clean ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from layerparity.anatomy.site import PREFILL
from layerparity.judge.align import Pair
from layerparity.judge.rows import by_token, real_tokens
from layerparity.numbers.at_the_end import at_the_end, next_tokens, of_so_many, sizes, unlike

# Of fewer unlike positions a largest number, or a mean, is one token's.
_FEWEST = 16


class CleanEnd(NamedTuple):
    """The largest `sizes` of clean ways, and which tokens of batch * token are judged, int64."""

    sizes: dict[str, float]
    tokens: torch.Tensor


def end_metrics(
    pair: Pair,
    golden: torch.Tensor,
    candidate: torch.Tensor,
    mask: torch.Tensor | None,
    clean: CleanEnd | None,
) -> dict[str, float]:
    """Return the numbers of a pair's logits, of the pair's axes, over its real tokens.

    ``mask`` is bool [batch, token], None for all. With ``clean`` those of the judged tokens are
    also given over the clean ways': ``kl_mean_ratio``, 1 where rounding explains all.
    """
    axes = pair.golden.record.axes
    left, right = by_token(golden, axes), by_token(candidate, axes)
    real = real_tokens(left, mask)
    whole, columns, given = _prompts(pair, real)
    ids = None if pair.last or pair.site.phase != PREFILL else given
    ids = ids if ids is not None and ids.shape == whole.shape else None
    labels = next_tokens(left, whole, ids, columns).flatten()
    left, right = left.flatten(0, 1), right.flatten(0, 1)

    def of(tokens: torch.Tensor) -> dict[str, float]:
        ours, theirs = (each.index_select(0, tokens) for each in (left, right))
        return at_the_end(ours, theirs, labels[tokens])

    every = torch.nonzero(real.flatten()).flatten()
    found = of(every)
    count = (
        0 if clean is None else unlike(given, _within(clean.tokens, whole, columns), whole.shape)
    )
    if clean is None or not clean.sizes or count < _FEWEST:
        return found
    judged = found if clean.tokens.equal(every) else of(clean.tokens)
    theirs = of_so_many(clean.sizes, count)
    ratios = {
        f"{name}_ratio": _over(size, theirs[name])
        for name, size in sizes(judged).items()
        if name in theirs
    }
    return found | ratios


def _prompts(
    pair: Pair, real: torch.Tensor
) -> tuple[torch.Tensor, Sequence[int], torch.Tensor | None]:
    """Return which tokens of whole prompts are real, those that logits are of, and all tokens.

    ``real`` is bool [batch, token] of these logits; the first is of all. No columns stand for all.
    """
    source = pair.golden.source
    kept, mask = source.manifest.kept, source.prompt_mask
    there = kept and mask is not None and real.shape[1] == len(kept.columns)
    if pair.site.phase != PREFILL or mask is None or not there:
        return real, (), source.token_ids
    return mask, kept.columns, source.token_ids


def _within(tokens: torch.Tensor, whole: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """Return the numbers within ``whole``, [batch, token], of tokens numbered among columns."""
    if not columns:
        return tokens
    count = len(columns)
    return tokens // count * whole.shape[1] + torch.tensor(columns)[tokens % count]


def _over(size: float, clean: float) -> float:
    """Return a size over that of clean ways, which is 0 of a head of zeros: then 0, or infinite."""
    if clean:
        return size / clean
    return math.inf if size else 0.0
