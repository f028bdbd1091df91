"""Judge one site: a candidate's error against its noise floor, whole and by token, channel, ...

R, ``error_ratio``, is ||candidate - reference|| / floor, where the floor is the largest such norm
among clean ways. ``slope`` is that of (candidate - golden) on the reference: what a wrong factor
leaves, however small. ``offset`` is the mean of (candidate - golden) in noise floors.
``slope_token`` is how far tokens are off by a factor each, ``outlier`` the error of the token that
stands out most among the candidate's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.chance import FEW_NUMBERS, as_many_alike, by_chance, of_few
from layerparity.numbers.clean_slopes import CleanSlopes
from layerparity.numbers.floor import LEAST, TINY, Floor, group_floor, scales
from layerparity.numbers.golden_slopes import GoldenSlopes, may_be_a_mistake, without_golden
from layerparity.numbers.site_sums import apart_by_group, site_sums
from layerparity.numbers.token_factors import FEW, factor_ratio, standing_out, ways_apart
from layerparity.numbers.token_sums import (
    CHANNEL,
    FEWEST,
    HEAD,
    WHOLE,
    Sent,
    SiteSums,
    Slopes,
    TokenLayout,
)
from layerparity.numbers.typical_floor import LUCKY, SHARED, TypicalFloor

# No number's error is below this: machines flush what is smaller to zero.
_FLUSHED = torch.finfo(torch.float32).tiny
# One token in so many, those with the largest errors, says nothing of factors.
_ODD = 16
# Experts whose variance is worked out at once.
_AT_ONCE = 8


@dataclass
class JudgedSite:
    """What one site is judged by, its judged tokens only.

    ``candidate``, ``golden`` and ``reference`` are floating [token, element]. ``tokens``, int64
    [token], numbers the judged tokens among all batch * token ones, of which ``real`` are not
    padding. ``experts`` is bool [token, expert] where the tokens were routed. ``floor`` holds the
    errors of clean ways at the site, ``clean`` the slopes that they show at sites of this kind;
    ``epsilon`` is that of the candidate's type. ``typical`` is one token's floor as a rule, None
    where too few are known.
    """

    candidate: torch.Tensor
    golden: torch.Tensor
    reference: torch.Tensor
    tokens: torch.Tensor
    real: int
    layout: TokenLayout
    floor: Floor
    clean: CleanSlopes
    epsilon: float
    experts: torch.Tensor | None = None
    typical: TypicalFloor | None = None

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidate, golden and reference."""
        return self.candidate, self.golden, self.reference


@dataclass
class Deviation:
    """Metrics by name, and profiles by grouping for whoever explains a failure.

    A profile is float64 [group].
    """

    metrics: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, np.ndarray] = field(default_factory=dict)


def deviation(site: JudgedSite) -> Deviation:
    """Return everything that the calibrated tolerance judges at one site."""
    with one_thread():
        scale = scales(site.floor.elements)
        sent = None if site.experts is None else Sent.of(site.experts)
    # Sums are shared out to the threads that torch has; what is made of them is small.
    sums = site_sums(site.sides, scale, site.layout)
    experts = None if sent is None else _of_experts(site, sums, scale.square(), sent)
    with one_thread():
        return _judged(site, sums, scale, experts)


class _Experts(NamedTuple):
    """The slope over the tokens that each expert was sent, and its variance, float64 [expert].

    The variance is beside that of the tokens.
    """

    sent: Sent
    slopes: Slopes
    variance: torch.Tensor


def _judged(
    site: JudgedSite, sums: SiteSums, scale: torch.Tensor, experts: _Experts | None
) -> Deviation:
    """Return what a site's sums say; ``scale`` is float64 [element]."""
    result = Deviation()
    _ratios(site, sums, None if experts is None else experts.sent, result)
    # The floor by element was summed over all real tokens, of which fewer may be judged.
    part = site.tokens.numel() / max(site.real, 1)
    by_element, weight = sums.slopes[CHANNEL], scale.square()
    own = GoldenSlopes(site.golden, site.reference, scale)
    for grouping in site.layout.groupings:
        slopes = sums.slopes[grouping]
        noise = group_floor(site.floor.elements, weight, site.layout, grouping) * part
        variance = _across(site.layout, grouping, by_element.p, by_element.q, slopes)
        # A slip must not count as noise: what a slope explains of the error is taken off.
        error = site.layout.sums(sums.error_elements * weight, grouping)
        clean = site.clean.variance(grouping, _left(error, slopes), noise, slopes.q)
        name = f"slope_{grouping}".removesuffix("_whole")
        of_golden = partial(own.products, site.layout, grouping)
        _note_slope(result, name, slopes, variance + clean, of_golden)
    _by_token(site, sums, result)
    if experts is not None:
        _note_slope(
            result,
            "slope_expert",
            experts.slopes,
            experts.variance,
            lambda: experts.sent.sums(own.by_token),
        )
    # An offset regresses on 1, whose sum of squares is the number of tokens.
    ones = torch.full_like(sums.differences, site.tokens.numel())
    variance = _across(site.layout, WHOLE, sums.differences, ones, sums.offset)
    _note_slope(result, "offset", sums.offset, variance, lambda: own.offset)
    return result


def _ratios(site: JudgedSite, sums: SiteSums, sent: Sent | None, result: Deviation) -> None:
    """Note the ratio of error to floor: of the whole site and of the worst group of each kind."""
    tokens, width = site.candidate.shape
    floors = site.floor.tokens[:, site.tokens].double()
    error, square = sums.error_tokens.sum(), sums.square_tokens.sum()
    # The largest total of one way: the worst way of each token together is no computation.
    own = torch.maximum(floors.sum(1).max(), _least(site, square, tokens * width))
    alike = float(as_many_alike(floors.mean(0), sums.error_tokens))
    total, chance = _total(site, own, sums.square_tokens, alike)
    # Nothing typical is known by element: its floor is raised as far as the whole site's was.
    few = max(of_few(tokens), chance) * float(total / own if own > 0 else 1.0)
    total = total * chance
    result.metrics |= {
        "error_ratio": _root(error, total),
        "golden_error_ratio": _root(sums.own, total),
        "floor_rel_l2": math.sqrt(float(total / square)) if square else 0.0,
    }
    by_token = torch.maximum(floors.amax(0), _least(site, sums.square_tokens, width))
    if site.typical is not None:
        typical = site.typical.of_tokens(sums.square_tokens)
        # No token is worth more independent numbers than it has.
        freedom = min(site.typical.freedom, width)
        by_token = site.typical.raised_to_typical(by_token, typical, freedom)
    per_token = (sums.error_tokens, by_token, sums.square_tokens)
    _note_worst(result, "position", per_token, width)
    part = tokens / max(site.real, 1)
    seen = site.floor.elements.double().amax(0) * part
    by_element = torch.maximum(seen, _least(site, sums.square_elements, tokens))
    per_element = (sums.error_elements, by_element * few, sums.square_elements)
    if tokens >= FEWEST:
        # A channel's few numbers may all be near zero, and their rounding is not.
        _note_worst(result, CHANNEL, per_element, tokens)
    if HEAD in site.layout.groupings:
        per_head = [site.layout.sums(each, HEAD) for each in per_element]
        _note_worst(result, HEAD, per_head, tokens * width // site.layout.heads)
    if sent is not None:
        groups = [sent.sums(each) for each in per_token]
        # An expert without tokens has no error either: counted as one, its floor stays a number.
        groups[1] = groups[1] * of_few(sent.counts.double().clamp_min(1))
        _note_worst(result, "expert", groups, width * sent.counts)


def _total(
    site: JudgedSite, own: torch.Tensor, squares: torch.Tensor, tokens: float
) -> tuple[torch.Tensor, float]:
    """Return the whole site's squared floor, and the factor chance may put on a squared error.

    ``own`` is the floor that clean ways showed here; ``squares``, float64 [token], the reference's;
    ``tokens`` as many as are alike.
    """
    width = site.candidate.shape[-1]
    if site.typical is None:
        return own, by_chance(tokens, width)
    # Tokens are independent draws: so many of them are worth so many times one's numbers.
    freedom = min(site.typical.freedom, width) * tokens
    typical = site.typical.of_tokens(squares).sum()
    return site.typical.raised_to_typical(own, typical, freedom), 1 + FEW_NUMBERS / freedom


def least_floor(
    dtype: torch.dtype, epsilon: float, square: torch.Tensor, count: int
) -> torch.Tensor:
    """Return the least squared floor of so many numbers, from their reference's ``square``.

    ``dtype`` is that of the candidate's tensor, ``epsilon`` that of the type it was computed in;
    ``square`` is float64 of any shape, as is the result.
    """
    kind = torch.finfo(dtype)
    # No result is nearer than the type's least step: float16's is far above what is flushed.
    smallest = max(_FLUSHED, kind.smallest_normal * kind.eps)
    return (LEAST * epsilon) ** 2 * square + smallest**2 * count


def _least(site: JudgedSite, square: torch.Tensor, count: int) -> torch.Tensor:
    return least_floor(site.candidate.dtype, site.epsilon, square, count)


def _note_worst(
    result: Deviation, name: str, sums: Sequence[torch.Tensor], count: int | torch.Tensor
) -> None:
    """Note the worst group's ratio and which it is.

    ``sums`` are the squared error, floor and reference of each group, ``count`` the numbers in one.
    The floor of a few numbers says little: it is drawn to what the groups have in common, their
    median floor, as it is and in relation to the reference.
    """
    error, floor, square = sums
    common = (floor / square.clamp_min(TINY))[square > 0]
    if common.numel():
        # A number near zero is a sum of large ones; a massive one rounds by its own size.
        # Medians, since one chaotic group would raise a mean for all of them.
        typical = torch.maximum(floor.median(), common.median() * square)
        drawn = (count * floor + SHARED * typical) / (count + SHARED)
        # What is noisy in every way is so by no luck: no floor is drawn down all the way.
        floor = torch.maximum(drawn, floor / LUCKY)
    ratio = torch.where(floor > 0, (error / floor).sqrt(), torch.where(error > 0, torch.inf, 0.0))
    if ratio.numel():
        worst = int(ratio.argmax())
        result.metrics[f"error_ratio_{name}"] = float(ratio[worst])
        result.metrics[f"error_ratio_{name}_index"] = float(worst)
        result.profiles[f"error_ratio {name}"] = ratio.numpy()


def _by_token(site: JudgedSite, sums: SiteSums, result: Deviation) -> None:
    """Note how far tokens are off by a factor each, and which of them stands out most.

    Of few tokens neither is known well enough.
    """
    count, width = site.candidate.shape
    if site.floor.weighed is None or count < FEW:
        return
    floors = site.floor.weighed[site.tokens]
    floors = floors.clamp_min(0) + (LEAST * site.epsilon) ** 2 * sums.squares
    # A few squares are off from their mean by chance, those of the clean ways like these.
    chance = 1 + FEW / count
    # One token whose error outweighs all others' has a factor by itself: that is no factor of each.
    most = sums.weighed.argsort()[: count - count // _ODD]
    error, floor = float(sums.weighed[most].sum()), float(floors[most].sum())
    for grouping, shared in sums.shared.items():
        if grouping not in site.floor.factors:
            # The floor was measured of a site that was laid out otherwise.
            continue
        name = f"slope_token_{grouping}".removesuffix("_whole")
        share = site.floor.factors[grouping] * chance
        found = float(shared[most].sum())
        result.metrics[name] = _root(found, sums.squares[most].sum())
        result.metrics[f"{name}_ratio"] = factor_ratio(found, error, share, floor)
    if min(count, width) >= FEWEST:
        ways = ways_apart(site.floor.tokens[:, site.tokens])
        among = math.inf if site.floor.freedom is None else site.floor.freedom
        index, ratio, z = standing_out(sums.weighed, floors, ways, among)
        result.metrics |= {"outlier": ratio, "outlier_z": z, "outlier_index": float(index)}


def _left(errors: torch.Tensor, slopes: Slopes) -> torch.Tensor:
    """Return what is left of squared errors once the groups' slopes are taken off; [group]."""
    return (errors - slopes.slope.square() * slopes.q).clamp_min(0)


def _of_experts(site: JudgedSite, sums: SiteSums, weight: torch.Tensor, sent: Sent) -> _Experts:
    """Return the experts' slopes; ``weight`` is float64 [element].

    The variance is whole for each expert that may have the most significant slope. For the others,
    the part that costs little to know is enough to tell that they have not.
    """
    with one_thread():
        p, q = sums.products, sums.squares
        pp, pq, qq = (sent.sums(each) for each in (p * p, p * q, q * q))
        slopes = Slopes(sent.sums(p), sent.sums(q), pp, pq, qq, len(p))
        share = sent.counts / max(site.real, 1)
        noise = group_floor(site.floor.elements, weight, site.layout, WHOLE) * share
        left = _left(sent.sums(sums.weighed), slopes)
        # The slopes count all tokens of the site: an expert of too few is ruled out here.
        few = torch.where(sent.counts < FEWEST, torch.inf, 0.0)
        variance = site.clean.variance(WHOLE, left, noise, slopes.q) + few
        bound = _significance(slopes, variance)
        order = bound.argsort(descending=True).tolist()
    most = 0.0
    for some in (order[start : start + _AT_ONCE] for start in range(0, len(order), _AT_ONCE)):
        # More variance means a lower z: nobody who is below the most now has the most.
        if bound[some[0]] == 0 or bound[some[0]] < most:
            break
        apart = apart_by_group(site.sides, weight, sent.groups(some), slopes.slope[some])
        variance[some] += apart / slopes.q[some].square().clamp_min(TINY)
        most = max(most, float(_significance(slopes, variance)[some].max()))
    return _Experts(sent, slopes, variance)


def _across(
    layout: TokenLayout, grouping: str, p: torch.Tensor, q: torch.Tensor, slopes: Slopes
) -> torch.Tensor:
    """Return the variance of each group's slope with its elements as clusters.

    Tokens share what is constant in them: a massive channel rounds alike in all of them, and would
    by itself look like a factor. A factor of a group is one that its elements agree on.
    """
    # A channel is one element, which agrees with itself.
    if grouping == CHANNEL:
        return torch.zeros_like(slopes.p)
    each = slopes.slope.repeat_interleave(layout.elements // slopes.p.numel())
    apart = layout.sums((p - each * q).square(), grouping)
    return apart / slopes.q.square().clamp_min(TINY)


def _note_slope(
    result: Deviation,
    name: str,
    slopes: Slopes,
    variance: torch.Tensor,
    of_golden: Callable[[], torch.Tensor],
) -> None:
    """Note the group whose slope is the most significant, with its z.

    ``variance`` is what is to be added to that of the tokens, float64 [groups]; ``of_golden`` gives
    the golden's own products, of that shape.
    """
    slope, z = slopes.slope, _significance(slopes, variance)
    # The golden's products take another reading of two tensors, which few slopes are worth.
    if may_be_a_mistake(slope, z):
        left = without_golden(slope, of_golden() / slopes.q.clamp_min(TINY))
        # The standard error stays the same, and z goes with the slope.
        slope, z = left, z * left.abs() / slope.abs().clamp_min(TINY)
    worst = int(z.argmax())
    result.metrics[name] = float(slope[worst])
    result.metrics[f"{name}_z"] = float(z[worst])
    if z.numel() > 1:
        result.metrics[f"{name}_index"] = float(worst)
        result.profiles[name] = slope.numpy()


def _significance(slopes: Slopes, variance: torch.Tensor) -> torch.Tensor:
    """Return each slope's z, float64 [group] as ``variance`` is, which adds to that of tokens."""
    error = (slopes.variance + variance).sqrt()
    return torch.where(slopes.slope == 0, 0.0, slopes.slope.abs() / error.clamp_min(TINY))


def _root(error: torch.Tensor | float, floor: torch.Tensor) -> float:
    if float(floor) > 0:
        return math.sqrt(float(error) / float(floor))
    return math.inf if float(error) > 0 else 0.0
