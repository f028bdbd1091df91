"""Close-up: the site a report looks at, and the histogram, quantiles and worst of its errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from layerparity.anatomy.site import Site
from layerparity.numbers.deviation import JudgedSite
from layerparity.numbers.floor import LEAST
from layerparity.record.portrait import ULP_EDGES, Element, Instead, InsteadKind
from layerparity.record.verdict import Outcome, Row, Verdict

WORST = 16
# Elements that quantiles are taken of, evenly strewn over the site.
_SAMPLE = 1 << 18
_ROWS = 1 << 20
_SIGMAS = tuple(0.25 * step for step in range(-16, 17))


@dataclass(frozen=True)
class Sides:
    """Two sides and, where there is one, the reference: floating [tokens, elements]."""

    golden: torch.Tensor
    candidate: torch.Tensor
    reference: torch.Tensor | None = None

    @property
    def believed(self) -> torch.Tensor:
        """What an error is the distance from."""
        return self.golden if self.reference is None else self.reference

    @property
    def judged(self) -> dict[str, torch.Tensor]:
        """The sides whose errors can be told."""
        sides = {"candidate": self.candidate}
        return sides if self.reference is None else {**sides, "golden": self.golden}


def sigma(site: JudgedSite) -> torch.Tensor:
    """Return the size of clean errors at each element, float64 [tokens, elements].

    The floor is known by token and by element; their product over the sum is its rank-one estimate.
    """
    least = (LEAST * site.epsilon) ** 2 * site.reference.double().square()
    tokens = site.floor.tokens[:, site.tokens].double().amax(0)
    tokens = torch.maximum(tokens, least.sum(1))
    elements = torch.maximum(site.floor.elements.double().amax(0), least.sum(0))
    product = tokens.unsqueeze(1) * (elements / elements.sum().clamp_min(1e-300))
    return torch.maximum(product, least).sqrt()


def ulp_histogram(values: torch.Tensor, believed: torch.Tensor, dtype: torch.dtype) -> list[int]:
    """Count elements by their distance from what is believed, in units of a dtype's last place.

    ``values`` and ``believed`` are floating [tokens, elements]. Bins end at `ULP_EDGES`, upper
    edges included; one more holds the rest, NaN among it.
    """
    edges = torch.tensor(ULP_EDGES, dtype=torch.float64)
    counts = torch.zeros(len(ULP_EDGES) + 1, dtype=torch.int64)
    step = max(1, _ROWS // max(values.shape[1], 1))
    for ours, right in zip(values.split(step), believed.split(step), strict=True):
        wide = right.double()
        distance = (ours.double() - wide).abs() / spacing(wide, dtype)
        bins = torch.bucketize(distance.nan_to_num(math.inf, math.inf).flatten(), edges)
        counts += torch.bincount(bins, minlength=counts.numel())
    return counts.tolist()


def spacing(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of a dtype around float64 values."""
    info = torch.finfo(dtype)
    size = values.abs().clamp(info.smallest_normal, info.max)
    _, exponent = torch.frexp(size)
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)


def quantiles(sides: Sides, floor: torch.Tensor) -> dict[str, list[float]]:
    """Return quantiles of (side - reference) / floor, beside the normal ones they belong to.

    ``floor`` is float64 [tokens, elements], the size of clean errors there; see `sigma`.
    """
    stride = max(1, floor.numel() // _SAMPLE)
    floor = floor.flatten()[::stride]
    believed = sides.believed.flatten()[::stride].double()
    reach = -NormalDist().inv_cdf(0.5 / max(floor.numel(), 2))
    normal = [each for each in _SIGMAS if abs(each) <= reach]
    points = {"normal": normal}
    for name, values in sides.judged.items():
        error = values.flatten()[::stride].double() - believed
        scaled = torch.where(error == 0, 0.0, error / floor.clamp_min(1e-300))
        ordered = scaled[scaled.isfinite()].sort().values
        if ordered.numel():
            last = ordered.numel() - 1
            places = [min(int(NormalDist().cdf(z) * ordered.numel()), last) for z in normal]
            points[name] = [_short(float(ordered[place])) for place in places]
    return points


def worst_elements(
    sides: Sides, floor: torch.Tensor | None, places: Sequence[tuple[int, int]], heads: int
) -> tuple[Element, ...]:
    """Return the elements that are farthest off, in floors where there is one, else as they are.

    ``floor`` is float64 [tokens, elements]; ``places`` are the sequence of each token and its
    position there; ``heads`` is 0 where the elements are no heads.
    """
    error = (sides.candidate.double() - sides.believed.double()).abs()
    if floor is not None:
        error = torch.where(error == 0, 0.0, error / floor.clamp_min(1e-300))
    error = error.nan_to_num(math.inf, math.inf)
    width = error.shape[1]
    largest = error.flatten().topk(min(WORST, error.numel()))
    elements = []
    for index, value in zip(largest.indices.tolist(), largest.values.tolist(), strict=True):
        row, column = divmod(index, width)
        reference = None if sides.reference is None else float(sides.reference[row, column])
        sequence, token = places[row]
        number, channel = divmod(column, width // heads if heads > 1 else width)
        head = number if heads > 1 else None
        ours, theirs = (float(each[row, column]) for each in (sides.golden, sides.candidate))
        off = _short(value)
        elements.append(Element(sequence, token, channel, ours, theirs, reference, off, head))
    return tuple(each for each in elements if each.error > 0)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class CloseUp:
    """Which site the report shows in close-up: None where no site of real numbers can be shown.

    ``place`` is the site that shows the fault, or the one shown; ``instead`` says why another site
    than the failing one is shown.
    """

    place: Site
    site: Site | None
    instead: Instead | None = None


def choose_close_up(verdict: Verdict, shown: Sequence[Row]) -> CloseUp | None:
    """Return the site that the report shows in close-up, None where there is none to show.

    ``shown`` are the rows that one can be made of. The guilty block is not left: what is right
    elsewhere says nothing of it.
    """
    guilty = verdict.guilty
    if guilty is not None and guilty.site is not None:
        return _of_site(shown, guilty.site)
    if guilty is not None:
        return _of_weights(shown, guilty.place.site("out"))
    failed = next((row.site for row in shown if row.outcome is Outcome.FAIL), None)
    if failed is not None:
        return CloseUp(failed, failed)
    largest = max(shown, key=_error, default=None)
    return None if largest is None else CloseUp(largest.site, largest.site)


def _of_site(shown: Sequence[Row], asked: Site) -> CloseUp:
    """Return the site itself, else the one of its block that shows the most of what follows."""
    if any(row.site == asked for row in shown):
        return CloseUp(asked, asked)

    def weight(row: Row) -> tuple[bool, bool, float]:
        failed = row.outcome is Outcome.FAIL
        return failed and row.site.component == asked.component, failed, _rel_l2(row)

    off = [row for row in _inside(shown, asked) if row.outcome is not Outcome.PASS]
    largest = max(off, key=weight, default=None)
    if largest is None:
        return CloseUp(asked, None, Instead(InsteadKind.NOTHING_OFF, str(asked)))
    return CloseUp(asked, largest.site, Instead(InsteadKind.FOLLOWING, str(asked)))


def _of_weights(shown: Sequence[Row], guilty: Site) -> CloseUp:
    """Return the site of a place whose weights differ that has the largest error, though it passes.

    Without one of the very component it is one of its block.
    """

    def weight(row: Row) -> tuple[bool, tuple[float, float]]:
        return row.site.path == guilty.path, _error(row)

    largest = max(_inside(shown, guilty), key=weight, default=None)
    if largest is None:
        return CloseUp(guilty, None, Instead(InsteadKind.NO_ERROR, guilty.path))
    return CloseUp(guilty, largest.site, Instead(InsteadKind.LARGEST_ERROR, guilty.path))


def _inside(shown: Sequence[Row], place: Site) -> list[Row]:
    """Return the rows of what a place's stage computes in its step."""
    return [
        row
        for row in shown
        if row.site.place.stage == place.place.stage
        and row.site.pass_step == place.pass_step
        and row.site.local != ":in"
    ]


def _rel_l2(row: Row) -> float:
    return row.metrics.get("rel_l2", 0.0)


def _error(row: Row) -> tuple[float, float]:
    return row.metrics.get("error_ratio", 0.0), _rel_l2(row)
