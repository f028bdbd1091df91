"""Deviation: how a candidate's error at one site stands against its noise floor, by every grouping.

R is ||candidate - reference|| / floor, the floor being the largest such norm among clean ways. The
slope is that of (candidate - golden) on the reference: what a wrong factor leaves, however small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from layerparity.noise.floor import TINY, Floor, group_floor, scales
from layerparity.noise.groups import CHANNEL, HEAD, WHOLE, Layout
from layerparity.noise.regression import FEWEST, Slopes

# No floor is below this part of one rounding (epsilon of the candidate's type) of the reference:
# clean ways may happen to agree to the bit, on powers of two or on constants.
LEAST = 0.1
# What the groups of a site have in common counts as much as this many numbers of one group.
_SHARED = 16
Count = TypeVar("Count", float, torch.Tensor)


@dataclass
class Tensors:
    """One site, judged tokens only: candidate, golden and reference, floating [tokens, elements].

    ``tokens`` numbers the judged tokens among all, ``experts`` is bool [tokens, experts] where the
    tokens were routed, and ``spread`` the slopes that clean ways show at sites of this kind.
    """

    candidate: torch.Tensor
    golden: torch.Tensor
    reference: torch.Tensor
    tokens: torch.Tensor
    real: int
    layout: Layout
    floor: Floor
    spread: dict[str, float]
    epsilon: float
    experts: torch.Tensor | None = None


@dataclass
class Deviation:
    """Metrics by name, and per-group profiles for whoever explains a failure."""

    metrics: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, list[float]] = field(default_factory=dict)


def deviation(site: Tensors) -> Deviation:
    """Return everything the calibrated tolerance judges at one site."""
    found = Deviation()
    reference = site.reference.double()
    error = (site.candidate.double() - reference).square()
    own = (site.golden.double() - reference).square().sum(1)
    least = (LEAST * site.epsilon) ** 2 * reference.square()
    _ratios(site, error, own, least, found)
    _slopes(site, reference, found)
    return found


def _ratios(
    site: Tensors,
    error: torch.Tensor,
    own: torch.Tensor,
    least: torch.Tensor,
    found: Deviation,
) -> None:
    floors = site.floor.tokens[:, site.tokens].double()
    few = _of_few(site.tokens.numel())
    total = torch.maximum(floors.sum(1).max(), least.sum()) * few
    norm = math.sqrt(float(site.reference.double().square().sum()))
    found.metrics |= {
        "error_ratio": _root(error.sum(), total),
        "golden_error_ratio": _root(own.sum(), total),
        "floor_rel_l2": math.sqrt(float(total)) / norm if norm else 0.0,
    }
    by_token = torch.maximum(floors.amax(0), least.sum(1))
    square = reference_square(site)
    tokens, width = square.shape
    _group(found, "position", (error.sum(1), by_token, square.sum(1)), width)
    part = site.tokens.numel() / max(site.real, 1)
    by_element = torch.maximum(site.floor.elements.double().amax(0) * part, least.sum(0))
    per_element = (error.sum(0), by_element * few, square.sum(0))
    if tokens >= FEWEST:
        # A channel's few numbers may all be near zero, and their rounding is not.
        _group(found, CHANNEL, per_element, tokens)
    if HEAD in site.layout.groupings:
        per_head = [site.layout.sums(each, HEAD) for each in per_element]
        _group(found, HEAD, per_head, tokens * width // site.layout.heads)
    if site.experts is not None:
        routed = site.experts.double()
        sent = routed.sum(0)
        groups = [each @ routed for each in (error.sum(1), by_token, square.sum(1))]
        groups[1] = groups[1] * _of_few(sent.clamp_min(1))
        _group(found, "expert", groups, width * sent)


def _of_few(tokens: Count) -> Count:
    """Return what to multiply a squared floor by, as it was seen in so many tokens only.

    All numbers of one token share factors (a norm, a softmax), which round well or badly together:
    of one token, the floor itself is off by a factor.
    """
    return (1 + 1 / tokens) ** 2


def reference_square(site: Tensors) -> torch.Tensor:
    """Return the squares of the reference, float64 [tokens, elements]."""
    return site.reference.double().square()


def _group(
    found: Deviation, name: str, sums: Sequence[torch.Tensor], count: int | torch.Tensor
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
        usual = torch.maximum(floor.median(), common.median() * square)
        floor = (count * floor + _SHARED * usual) / (count + _SHARED)
    ratio = torch.where(floor > 0, (error / floor).sqrt(), torch.where(error > 0, torch.inf, 0.0))
    if ratio.numel():
        worst = int(ratio.argmax())
        found.metrics[f"error_ratio_{name}"] = float(ratio[worst])
        found.metrics[f"error_ratio_{name}_index"] = float(worst)
        found.profiles[f"error_ratio {name}"] = _short(ratio)


def _slopes(site: Tensors, reference: torch.Tensor, found: Deviation) -> None:
    scale = scales(site.floor.elements)
    scaled = reference * scale
    difference = (site.candidate.double() - site.golden.double()) * scale
    products, squares = difference * scaled, scaled.square()
    part = site.tokens.numel() / max(site.real, 1)
    for grouping in site.layout.groupings:
        p, q = (site.layout.sums(each, grouping) for each in (products, squares))
        slopes = _regressed(p, q)
        noise = group_floor(site.floor.elements, site.layout, grouping) * part
        variance = _across(site.layout, grouping, products.sum(0), squares.sum(0), slopes)
        clean = site.spread.get(grouping, 0.0) ** 2 * noise / slopes.q.clamp_min(TINY)
        _note(found, f"slope_{grouping}".removesuffix("_whole"), slopes, variance + clean)
    if site.experts is not None:
        _by_expert(site, products, squares, part, found)
    ones = torch.ones_like(difference)
    p, q = (site.layout.sums(each, WHOLE) for each in (difference, ones))
    slopes = _regressed(p, q)
    variance = _across(site.layout, WHOLE, difference.sum(0), ones.sum(0), slopes)
    _note(found, "offset", slopes, variance)


def _by_expert(
    site: Tensors, products: torch.Tensor, squares: torch.Tensor, part: float, found: Deviation
) -> None:
    """Regress over the tokens of each expert."""
    assert site.experts is not None
    routed = site.experts.double()
    p, q = products.sum(1, keepdim=True) * routed, squares.sum(1, keepdim=True) * routed
    slopes = _regressed(p, q)
    apart = routed.T @ products - slopes.slope.unsqueeze(1) * (routed.T @ squares)
    variance = apart.square().sum(1) / slopes.q.square().clamp_min(TINY)
    noise = group_floor(site.floor.elements, site.layout, WHOLE) * part * routed.mean(0)
    clean = site.spread.get(WHOLE, 0.0) ** 2 * noise / slopes.q.clamp_min(TINY)
    few = torch.where(routed.sum(0) < FEWEST, torch.inf, 0.0)
    _note(found, "slope_expert", slopes, variance + clean + few)


def _regressed(p: torch.Tensor, q: torch.Tensor) -> Slopes:
    slopes = Slopes.start(p.shape[1])
    slopes.add(p, q)
    return slopes


def _across(
    layout: Layout, grouping: str, p: torch.Tensor, q: torch.Tensor, slopes: Slopes
) -> torch.Tensor:
    """Return the variance of each group's slope with its elements as clusters.

    Tokens share what is constant in them: a massive channel rounds alike in all of them, and would
    by itself look like a factor. A factor of a group is one that its elements agree on.
    """
    if grouping == CHANNEL:
        return torch.zeros_like(slopes.p)
    each = slopes.slope.repeat_interleave(layout.elements // slopes.p.numel())
    apart = layout.sums((p - each * q).square(), grouping)
    return apart / slopes.q.square().clamp_min(TINY)


def _note(found: Deviation, name: str, slopes: Slopes, variance: torch.Tensor) -> None:
    """Note the group whose slope is the most significant, with its z.

    ``variance`` is what is to be added to that of the tokens, float64 [groups].
    """
    slope = slopes.slope
    error = (slopes.variance + variance).sqrt()
    z = torch.where(slope == 0, 0.0, slope.abs() / error.clamp_min(TINY))
    worst = int(z.argmax())
    found.metrics[name] = float(slope[worst])
    found.metrics[f"{name}_z"] = float(z[worst])
    if z.numel() > 1:
        found.metrics[f"{name}_index"] = float(worst)
        found.profiles[name] = _short(slope)


def _root(error: torch.Tensor, floor: torch.Tensor) -> float:
    if float(floor) > 0:
        return math.sqrt(float(error / floor))
    return math.inf if float(error) > 0 else 0.0


def _short(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
