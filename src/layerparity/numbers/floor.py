"""Noise floor of one site: how far clean computations are from a reference and from the golden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.token_sums import TokenLayout, pieces

# No channel is believed to be cleaner than this part of the site's mean square error: a channel
# that happened to round exactly would outweigh all others.
_LEAST = 1e-4
TINY = 1e-300


@dataclass
class Floor:
    """The errors of ``ways`` at one site, in one floating type.

    ``tokens`` is float64 [way, batch * token], each token's sum of squared errors against the
    reference; ``elements`` float64 [way, element], the same summed over real tokens. ``spread``
    gives by grouping the largest slope of (way - golden) on the reference, in units of the floor.
    ``real`` is float64 [2, real tokens]: each one's largest floor, and its reference's square.
    """

    ways: tuple[str, ...]
    tokens: torch.Tensor
    elements: torch.Tensor
    spread: dict[str, float] = field(default_factory=dict)
    real: torch.Tensor | None = None


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
    spread = _spread(products, squares, elements, layout)
    largest = torch.stack([tokens.amax(0), by_token])[:, mask]
    return Floor(tuple(ways), tokens, elements, spread, largest)


def group_floor(elements: torch.Tensor, layout: TokenLayout, grouping: str) -> torch.Tensor:
    """Return each group's squared floor, scaled by `scales`, float64 [group].

    ``elements`` are a floor's, floating [way, element].
    """
    scaled = elements.double() * scales(elements).square()
    return layout.sums(scaled, grouping).amax(0)


def _spread(
    products: torch.Tensor, squares: torch.Tensor, elements: torch.Tensor, layout: TokenLayout
) -> dict[str, float]:
    """Return the largest slope among ways and groups, in units of the group's floor.

    ``products`` are each way's sums over tokens of (way - golden) * reference, float64 [way,
    element], ``squares`` those of reference^2.
    """
    weight = scales(elements).square()
    largest = {}
    for grouping in layout.groupings:
        p, q = (layout.sums(each * weight, grouping) for each in (products, squares))
        noise = group_floor(elements, layout, grouping).clamp_min(TINY)
        slope = p.abs() / q.clamp_min(TINY)
        largest[grouping] = float((slope * (q / noise).sqrt()).max())
    return largest
