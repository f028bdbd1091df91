"""Ties: whether noise explains that a token was sent elsewhere, and where nobody saw it, may have.

A token whose choice is seen to differ is tried by the reference's scores. Of a side that shows no
choices, a token near a tie is supposed to be sent elsewhere where what was computed from it stands
out of the noise. Where more of them stand out than ties explain, something is wrong, and none is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from layerparity.judge.references import SiteReference
from layerparity.numbers.deviation import least_floor
from layerparity.numbers.floor import scales
from layerparity.numbers.metrics.sets import sets_agree

# Two scores, each off by the noise of both sides: a gap of more standard errors is no tie.
TIE = 8.0
# An error of so many floors stands out, as that of an outlier does.
_OUT = 2.0
# How far the number of tokens sent elsewhere is off its mean by chance, in standard deviations.
_CHANCE = 4.0


def flips(
    golden: torch.Tensor,
    candidate: torch.Tensor,
    scores: SiteReference,
    mask: torch.Tensor,
    groups: SiteReference | None = None,
) -> dict[str, float]:
    """Return how many tokens chose otherwise, and how many of them not for noise.

    ``golden`` and ``candidate`` are int64 [tokens, k]; ``scores`` what the reference chose from,
    [tokens, choices]; ``mask`` bool [tokens]. A flip is noise where every expert that was given up
    for another stood within `TIE` standard errors of it in the reference. Where a router chooses
    among ``groups`` of experts first, [tokens, group], a flip between two groups is one as well.
    """
    wide, noise = scores_with_noise(scores, mask)
    of_groups = scores_with_noise(groups, mask) if groups is not None else None
    apart = ~sets_agree(golden, candidate) & mask
    margin, outside = math.inf, 0
    for token in torch.nonzero(apart).flatten().tolist():
        gap, limit = _gap(golden[token], candidate[token], wide[token]), TIE * float(noise[token])
        if not gap <= limit and of_groups is not None:
            scores_of_groups, noise_of_groups = of_groups
            size = wide.shape[-1] // scores_of_groups.shape[-1]
            left, right = (each[token] // size for each in (golden, candidate))
            gap = _gap(left, right, scores_of_groups[token])
            limit = TIE * float(noise_of_groups[token])
        margin = min(margin, gap)
        # Noise that is no number excuses nothing.
        outside += int(not gap <= limit)
    metrics = {"flips": float(apart.sum()), "flips_outside_noise": float(outside)}
    return metrics | ({"tie_margin": margin} if math.isfinite(margin) else {})


def scores_with_noise(
    scores: SiteReference, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reference's scores, float64 [token, choice], and their noise, float64 [token].

    ``mask``, bool [token], says which tokens are real.
    """
    wide = scores.values.double().reshape(mask.numel(), -1)
    floors = scores.floor.tokens.double().amax(0)
    if scores.typical is not None:
        typical = scores.typical.of_tokens(wide.square().sum(1))
        freedom = min(scores.typical.freedom, wide.shape[-1])
        floors = scores.typical.raised_to_typical(floors, typical, freedom)
    # A score of zero is no score: attention does not look ahead, a router not into groups that it
    # passed over, and nothing rounds there.
    noise = (floors / wide.ne(0).sum(1).clamp_min(1)).sqrt()
    return wide, torch.maximum(noise, noise[mask].mean())


def _gap(golden: torch.Tensor, candidate: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the largest score given up for a smaller one: best of the lost - worst of the new."""
    left, right = set(golden.tolist()), set(candidate.tolist())
    lost, new = list(left - right), list(right - left)
    if not lost or not new or min(*lost, *new) < 0 or max(new) >= scores.numel():
        return math.inf
    return float(scores[lost].max() - scores[new].min())


@dataclass(frozen=True)
class Supposed:
    """Which tokens may have been sent elsewhere, bool [token], and how many of all likely were."""

    tokens: torch.Tensor
    likely: float


def may_be_apart(
    chosen: torch.Tensor,
    off: torch.Tensor,
    asked: torch.Tensor,
    scores: SiteReference,
    groups: SiteReference | None = None,
) -> Supposed:
    """Return which ``asked`` tokens are near a tie and ``off``, and how many ties are likely.

    All three are bool [token]. ``chosen``, int64 [token, k], is what the golden chose by ``scores``
    [token, choice], among the best ``groups`` of experts where a router chooses these first,
    [token, group]; -1 is no choice.
    """
    wide, noise = scores_with_noise(scores, asked)
    none = wide.shape[1]
    taken = torch.zeros(len(wide), none + 1, dtype=torch.bool)
    taken = taken.scatter_(1, chosen.where(chosen >= 0, none), value=True)[:, :none]
    near, likely = _ties(wide, taken, noise)
    if groups is not None:
        of_groups, noise_of_groups = scores_with_noise(groups, asked)
        open_ = wide.unflatten(1, (of_groups.shape[1], -1)).ne(0).any(-1)
        near_groups, likely_groups = _ties(of_groups, open_, noise_of_groups)
        near, likely = near | near_groups, 1 - (1 - likely) * (1 - likely_groups)
    return Supposed(near & off & asked, float(likely[asked].sum()))


def ties_explain(passes: Iterable[Supposed]) -> bool:
    """Say whether ties explain so many tokens sent elsewhere, in all passes together.

    A decode step has one token: alone, it could always be one.
    """
    each = list(passes)
    mean = sum(one.likely for one in each)
    return sum(int(one.tokens.sum()) for one in each) <= mean + _CHANCE * math.sqrt(mean) + 1


def _ties(
    scores: torch.Tensor, taken: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the best left out is near the worst ``taken``, and how likely it changes places.

    ``scores`` are float64 [token, choice], ``taken`` bool of that shape, ``noise`` [token].
    """
    # A score of zero is none: the router did not look at that expert.
    left = scores.masked_fill(taken | scores.eq(0), -torch.inf).amax(1)
    gap = scores.masked_fill(~taken, torch.inf).amin(1) - left
    # Two scores differ by the noise of four: two of either side.
    likely = torch.special.erfc(gap / (2 * noise.clamp_min(1e-300)) / 2**0.5) / 2
    return gap <= TIE * noise, likely


def stands_out(candidate: torch.Tensor, wide: SiteReference, epsilon: float) -> torch.Tensor:
    """Return bool [token]: a candidate's error is so many floors of rounding there.

    That is of all numbers as they are, or each weighed by how far it rounds. ``candidate`` is
    floating [token, element], of the reference's tokens; ``epsilon`` is that of the type it was
    computed in.
    """
    reference = wide.values.double().reshape(candidate.shape)
    error, square = (candidate.double() - reference).square(), reference.square().sum(1)
    floor = torch.maximum(
        wide.floor.tokens.double().amax(0),
        least_floor(candidate.dtype, epsilon, square, candidate.shape[1]),
    )
    if wide.typical is not None:
        freedom = min(wide.typical.freedom, candidate.shape[1])
        floor = wide.typical.raised_to_typical(floor, wide.typical.of_tokens(square), freedom)
    off = error.sum(1) > _OUT**2 * floor
    if wide.floor.weighed is None:
        return off
    weight = scales(wide.floor.elements).square()
    return off | (error @ weight > _OUT**2 * wide.floor.weighed.clamp_min(0))
