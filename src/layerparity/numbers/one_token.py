"""Judge sites of one token each, as decode steps have them, many of them in one pass.

Each gets what `deviation` gives it by itself. A step has so few numbers that calling an operation
takes longer than what it computes; and one token, one cluster, tells no slope from chance: all have
a significance of 0, and channels and tokens are not told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.chance import FEW_NUMBERS, by_chance, of_few
from layerparity.numbers.deviation import Deviation, least_floor
from layerparity.numbers.floor import TINY, scales
from layerparity.numbers.token_sums import HEAD, WHOLE, TokenLayout
from layerparity.numbers.typical_floor import LUCKY, SHARED, TypicalFloor

EXPERT = "expert"


@dataclass
class OneTokenSites:
    """Sites of one judged token each, of one layout, as `JudgedSite` has them.

    ``candidate``, ``golden`` and ``reference`` are floating [site, element]. ``tokens``, float64
    [site, way], and ``elements``, float64 [site, way, element], are their floors. ``experts`` is
    bool [site, expert] where the tokens were routed.
    """

    candidate: torch.Tensor
    golden: torch.Tensor
    reference: torch.Tensor
    tokens: torch.Tensor
    elements: torch.Tensor
    layout: TokenLayout
    epsilon: float
    typical: TypicalFloor | None = None
    experts: torch.Tensor | None = None

    def least(self, square: torch.Tensor, count: int) -> torch.Tensor:
        """Return the least squared floor of so many numbers, float64 as their ``square``."""
        return least_floor(self.candidate.dtype, self.epsilon, square, count)


@one_thread()
def deviations(sites: OneTokenSites) -> list[Deviation]:
    """Return everything that the calibrated tolerance judges at each site."""
    c, g, r = (each.double() for each in (sites.candidate, sites.golden, sites.reference))
    scale = scales(sites.elements)
    found: list[tuple[str, torch.Tensor]] = []
    profiles: list[tuple[str, torch.Tensor]] = []
    error, square = (c - r).square_(), r.square()
    for name, ratio in _ratios(sites, error, square, (g - r).square_().sum(1)):
        if ratio.dim() > 1:
            worst = ratio.max(1)
            found += [(name, worst.values), (f"{name}_index", worst.indices)]
            profiles.append((name.replace("ratio_", "ratio "), ratio))
        else:
            found.append((name, ratio))
    difference, weight, none = c - g, scale.square(), torch.zeros(len(c), dtype=torch.float64)
    of_channels = difference * r * weight, square * weight
    groups = {
        grouping: [sites.layout.sums(each, grouping) for each in of_channels]
        for grouping in sites.layout.groupings
    }
    if sites.experts is not None:
        groups[EXPERT] = [each.sum(1, keepdim=True) * sites.experts for each in of_channels]
    for grouping, (p, q) in groups.items():
        slope, name = p / q.clamp_min(TINY), f"slope_{grouping}".removesuffix(f"_{WHOLE}")
        found += [(name, slope[:, 0]), (f"{name}_z", none)]
        if slope.shape[1] > 1:
            # Of significances that are all 0 the first group is the worst, as in `deviation`.
            found.append((f"{name}_index", none))
            profiles.append((name, slope))
    found += [("offset", (difference * scale).sum(1) / c.shape[1]), ("offset_z", none)]
    return _by_site(found, profiles)


def _ratios(
    sites: OneTokenSites, error: torch.Tensor, square: torch.Tensor, own: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ratios of error to floor by metric, float64 [site], or [site, group] of its groups.

    ``error`` and ``square`` are float64 [site, element], ``own`` [site] the golden's own error.
    """
    width, all_errors, all_squares = error.shape[1], error.sum(1), square.sum(1)
    floor = torch.maximum(sites.tokens.double().amax(1), sites.least(all_squares, width))
    raised, chance = floor, by_chance(1.0, width)
    if sites.typical is not None:
        freedom = min(sites.typical.freedom, width)
        typical = sites.typical.of_tokens(all_squares)
        raised = sites.typical.raised_to_typical(floor, typical, freedom)
        chance = 1 + FEW_NUMBERS / freedom
    total = raised * chance
    yield "error_ratio", _root(all_errors, total)
    yield "golden_error_ratio", _root(own, total)
    yield "floor_rel_l2", torch.where(all_squares > 0, (total / all_squares).sqrt(), 0.0)
    by_token = [each.unsqueeze(1) for each in (all_errors, raised, all_squares)]
    yield "error_ratio_position", _of_groups(by_token, width)
    if HEAD in sites.layout.groupings:
        seen = torch.maximum(sites.elements.double().amax(1), sites.least(square, 1))
        few = max(of_few(1.0), chance) * torch.where(floor > 0, raised / floor, 1.0)
        by_element = (error, seen * few.unsqueeze(1), square)
        by_head = [sites.layout.sums(each, HEAD) for each in by_element]
        yield "error_ratio_head", _of_groups(by_head, width // sites.layout.heads)
    if sites.experts is not None:
        # Each has this one token, or none.
        of_token = (all_errors, raised * of_few(1.0), all_squares)
        by_expert = [each.unsqueeze(1) * sites.experts for each in of_token]
        yield f"error_ratio_{EXPERT}", _of_groups(by_expert, width * sites.experts)


def _of_groups(sums: Sequence[torch.Tensor], count: int | torch.Tensor) -> torch.Tensor:
    """Return each group's ratio of error to floor, float64 [site, group].

    ``sums`` are the squared error, floor and reference of each, in that shape, ``count`` the
    numbers in one, of all groups or int64 [site, group]. As in `deviation`, the floor is drawn to
    what the site's groups have in common.
    """
    error, floor, square = sums
    # The median leaves out NaN, and with it the groups whose reference is zero.
    relative = torch.where(square > 0, floor / square.clamp_min(TINY), torch.nan)
    common = relative.nanmedian(1, keepdim=True).values
    typical = torch.maximum(floor.median(1, keepdim=True).values, common * square)
    drawn = (count * floor + SHARED * typical) / (count + SHARED)
    drawn = torch.maximum(drawn, floor / LUCKY)
    # A site whose reference is zero throughout has nothing in common to be drawn to.
    return _root(error, torch.where(common.isnan(), floor, drawn))


def _root(error: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    at_zero = torch.where(error > 0, torch.inf, 0.0)
    return torch.where(floor > 0, (error / floor).sqrt(), at_zero)


def _by_site(
    found: list[tuple[str, torch.Tensor]], profiles: list[tuple[str, torch.Tensor]]
) -> list[Deviation]:
    """Return metrics, [site] each, and profiles, [site, group] each, by site."""
    names = [name for name, _ in found]
    # One table leaves torch at once: to ask for each number takes longer than to compute it.
    table = torch.stack([values.double() for _, values in found], 1).tolist()
    arrays: list[tuple[str, np.ndarray]] = [(name, values.numpy()) for name, values in profiles]
    return [
        Deviation(
            dict(zip(names, row, strict=True)), {name: values[site] for name, values in arrays}
        )
        for site, row in enumerate(table)
    ]
