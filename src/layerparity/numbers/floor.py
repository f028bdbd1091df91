"""Noise floor of one site: how far clean computations are from a reference and from the golden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.token_factors import explained
from layerparity.numbers.token_sums import CHANNEL, TokenLayout, pieces

# No channel is believed to be cleaner than this part of the site's mean square error: a channel
# that happened to round exactly would outweigh all others.
_LEAST = 1e-4
TINY = 1e-300


@dataclass
class Floor:
    """The errors of ``ways`` at one site, in one floating type.

    ``tokens`` is float64 [way, batch * token], each token's sum of squared errors against the
    reference; ``elements`` float64 [way, element], the same summed over real tokens. ``weighed`` is
    float64 [batch * token], each token's largest floor when its elements are scaled by `scales`.
    ``slopes`` sample by grouping the slopes of (way - golden) on the reference. ``factors`` give by
    grouping the largest part of a way's error that one factor for each token (of each head)
    explains. ``real`` is float64 [2, real tokens]: each one's largest floor, and its reference's
    square. Floors of former versions have a ``spread`` in place of slopes, factors and weighed:
    the largest slope by grouping, in units of the floor.
    """

    ways: tuple[str, ...]
    tokens: torch.Tensor
    elements: torch.Tensor
    slopes: dict[str, SlopeSample] = field(default_factory=dict)
    real: torch.Tensor | None = None
    weighed: torch.Tensor | None = None
    factors: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)


def scales(elements: torch.Tensor) -> torch.Tensor:
    """Return 1 / standard error of each element up to a common factor, float64 [element].

    ``elements`` are a floor's, floating [way, element].
    """
    mean = elements.double().mean(0)
    least = _LEAST * float(mean.mean())
    return (mean + least).rsqrt() if float(mean.sum()) > 0 else torch.ones_like(mean)


@one_thread()
def measure_floor(
    ways: Mapping[str, torch.Tensor],
    golden: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    layout: TokenLayout,
) -> Floor:
    """Return the floor of one site.

    ``ways`` (by name), ``golden`` and ``reference`` are floating [batch * token, element];
    ``mask`` is bool [batch * token], true for real ones.
    """
    shape = reference.shape
    tokens = torch.zeros(len(ways), shape[0], dtype=torch.float64)
    elements, products = torch.zeros(2, len(ways), shape[1], dtype=torch.float64)
    squares = torch.zeros(shape[1], dtype=torch.float64)
    by_token = torch.zeros(shape[0], dtype=torch.float64)
    for rows in pieces(*shape):
        # What picks the real rows, without a copy where it picks them all.
        real = slice(None) if bool(mask[rows].all()) else mask[rows]
        wide, own = reference[rows].double(), golden[rows].double()
        square = wide.square()
        squares += square[real].sum(0)
        by_token[rows] = square.sum(1)
        for index, way in enumerate(ways.values()):
            value = way[rows].double()
            error = (value - wide).square_()
            tokens[index, rows] = error.sum(1)
            elements[index] += error[real].sum(0)
            products[index] += (value - own).mul_(wide)[real].sum(0)
    slopes = _slopes(products, squares, elements, layout)
    weighed, factors = _weighed(ways, reference, mask, scales(elements).square(), layout)
    largest = torch.stack([tokens.amax(0), by_token])[:, mask]
    return Floor(tuple(ways), tokens, elements, slopes, largest, weighed, factors)


def group_floor(elements: torch.Tensor, layout: TokenLayout, grouping: str) -> torch.Tensor:
    """Return each group's squared floor, scaled by `scales`, float64 [group].

    ``elements`` are a floor's, floating [way, element].
    """
    scaled = elements.double() * scales(elements).square()
    return layout.sums(scaled, grouping).amax(0)


def _slopes(
    products: torch.Tensor, squares: torch.Tensor, elements: torch.Tensor, layout: TokenLayout
) -> dict[str, SlopeSample]:
    """Return the slopes of the ways that differ from the golden, by grouping.

    ``products`` are each way's sums over tokens of (way - golden) * reference, float64 [way,
    element], ``squares`` those of reference^2, ``elements`` those of (way - reference)^2.
    """
    weight = scales(elements).square()
    # A way that is the golden to the bit is no other way.
    other = (products != 0).any(1)
    found = {}
    for grouping in layout.groupings:
        p, q, error = (
            layout.sums(each * weight, grouping)
            for each in (products[other], squares, elements[other])
        )
        size = q * error
        slopes = torch.where(size > 0, p.square() / size.clamp_min(TINY), 0.0)
        # Of several groups the largest: some always follow the reference more than others.
        worst = slopes.amax(1)
        mean = float(worst.mean()) if worst.numel() else 0.0
        found[grouping] = SlopeSample(mean, worst.numel())
    return found


def _weighed(
    ways: Mapping[str, torch.Tensor],
    reference: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    layout: TokenLayout,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return each token's largest weighed floor, and what factors explain of a way's error.

    Shapes are those of `measure_floor`; ``weight`` is float64 [element].
    """
    errors = torch.zeros(len(ways), reference.shape[0], dtype=torch.float64)
    groupings = [each for each in layout.groupings if each != CHANNEL]
    shared = torch.zeros(len(groupings), len(ways), dtype=torch.float64)
    for rows in pieces(*reference.shape):
        wide, real = reference[rows].double(), mask[rows]
        scaled = wide * weight
        terms = wide * scaled
        squares = [layout.sums(terms, each) for each in groupings]
        for index, way in enumerate(ways.values()):
            error = way[rows].double() - wide
            torch.mul(error, scaled, out=terms)
            for place, grouping in enumerate(groupings):
                products = layout.sums(terms, grouping)
                shared[place, index] += explained(products[real], squares[place][real])
            errors[index, rows] = error.square_() @ weight
    total = errors[:, mask].sum(1).clamp_min(TINY)
    shares = (shared / total).amax(1).tolist()
    return errors.amax(0), dict(zip(groupings, shares, strict=True))
