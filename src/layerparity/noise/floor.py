"""Floor: what clean computations of one site differ by, from a reference and from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerparity.noise.groups import Layout
from layerparity.noise.regression import Slopes

# No channel is believed to be cleaner than this part of the site's mean square error: a channel
# that happened to round exactly would outweigh all others.
_LEAST = 1e-4
TINY = 1e-300
CHUNK = 1 << 20


@dataclass
class Floor:
    """The errors of ``ways`` at one site, in one floating type.

    ``tokens`` is float32 [ways, batch * token], each token's sum of squared errors against the
    reference; ``elements`` float32 [ways, elements], the same summed over real tokens. ``spread``
    gives by grouping the largest slope of (way - golden) on the reference, in units of the floor.
    """

    ways: tuple[str, ...]
    tokens: torch.Tensor
    elements: torch.Tensor
    spread: dict[str, float] = field(default_factory=dict)


def scales(elements: torch.Tensor) -> torch.Tensor:
    """Return 1 / standard error of each element up to a common factor, float64 [elements]."""
    mean = elements.double().mean(0)
    least = _LEAST * float(mean.mean())
    return (mean + least).rsqrt() if float(mean.sum()) > 0 else torch.ones_like(mean)


def measure_floor(
    ways: Mapping[str, torch.Tensor],
    golden: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    layout: Layout,
) -> Floor:
    """Return the floor of one site.

    ``ways`` (by name), ``golden`` and ``reference`` are floating [tokens, elements];
    ``mask`` is bool [tokens], true for real ones.
    """
    squares = [(value.double() - reference.double()).square() for value in ways.values()]
    tokens = torch.stack([each.sum(1) for each in squares]).float()
    elements = torch.stack([each[mask].sum(0) for each in squares]).float()
    real = [value[mask].double() - golden[mask].double() for value in ways.values()]
    spread = _spread(real, reference[mask], elements, layout)
    return Floor(tuple(ways), tokens, elements, spread)


def group_floor(elements: torch.Tensor, layout: Layout, grouping: str) -> torch.Tensor:
    """Return each group's squared floor, scaled by `scales`, float64 [groups]."""
    scaled = elements.double() * scales(elements).square()
    return layout.sums(scaled, grouping).amax(0)


def _spread(
    differences: Sequence[torch.Tensor],
    reference: torch.Tensor,
    elements: torch.Tensor,
    layout: Layout,
) -> dict[str, float]:
    """Return the largest slope among ways and groups, in units of the group's floor."""
    scale = scales(elements)
    scaled = reference.double() * scale
    found = {}
    for grouping in layout.groupings:
        q = layout.sums(scaled.square(), grouping)
        noise = group_floor(elements, layout, grouping).clamp_min(TINY)
        unit = (q.sum(0) / noise).sqrt()
        largest = 0.0
        for difference in differences:
            sums = Slopes.start(layout.size(grouping))
            sums.add(layout.sums(difference * scale * scaled, grouping), q)
            largest = max(largest, float((sums.slope.abs() * unit).max()))
        found[grouping] = largest
    return found
