"""Noise floor of one site: how far clean computations are from a reference and from the golden.

The golden is not among them: one that is off would widen the floor to its own error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.chance import as_many_alike, by_chance
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.token_factors import FEW, explained, freedom_among
from layerparity.numbers.token_sums import CHANNEL, TokenLayout, pieces

# No channel is believed to be cleaner than this part of the site's mean square error: a channel
# that happened to round exactly would outweigh all others.
_LEAST = 1e-4
# No floor is below this part of one rounding (epsilon of the candidate's type) of the reference:
# clean ways may happen to agree to the bit, on powers of two or on constants.
LEAST = 0.1
# A way is the golden where the largest one is so much further from it, in squares: a processor may
# round what is left over of a vector otherwise, and which numbers these are, shapes say.
_SAME = 1e-2
# A golden that is so many times further from its reference than all clean ways, or than one
# rounding moves a number, is off. Clean goldens came to 1.17 at most, of 1,104 sites.
OFF = 2.0
TINY = 1e-300
# The way that computes with a quantised checkpoint's weights, where the golden has the original's.
PUBLISHED = "weights as published"
# JSON has no infinity.
_MOST = 1e9


@dataclass
class Floor:
    """The errors of ``ways`` at one site, in one floating type.

    ``tokens`` is float64 [way, batch * token], each token's sum of squared errors against the
    reference; ``elements`` float64 [way, element], the same summed over real tokens. ``weighed`` is
    float64 [batch * token], each token's largest floor when its elements are scaled by `scales`.
    ``slopes`` sample by grouping the slopes of (way - golden) on the reference. ``factors`` give by
    grouping the largest part of a way's error that one factor for each token (of each head)
    explains. ``real`` is float64 [2, real tokens]: each one's largest floor, and its reference's
    square. ``freedom`` is that of the ways' weighed errors over each other's; see `freedom_among`.
    Of fewer than `FEW` tokens there are no factors, and ``weighed`` and ``freedom`` are None.

    ``golden_shares`` are by pass the golden's own error over the largest one of the ways, or over
    what one rounding may do; () where nothing is known of it, such as of one in a shorter type.

    Of logits, ``ends`` are the largest `at_the_end.sizes` of a way against the golden, by name.

    The floors of several passes of one shape are one, with the passes in front of every shape;
    its slopes are the sample of all of them, its factors the largest.
    """

    ways: tuple[str, ...]
    tokens: torch.Tensor
    elements: torch.Tensor
    slopes: dict[str, SlopeSample] = field(default_factory=dict)
    real: torch.Tensor | None = None
    weighed: torch.Tensor | None = None
    factors: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    golden_shares: tuple[float, ...] = ()
    freedom: float | None = None

    @property
    def golden_share(self) -> float:
        """The largest of the golden's shares of all passes; 0 where none is known."""
        return max(self.golden_shares, default=0.0)

    def of_pass(self, index: int) -> Floor:
        """Return the floor of one of several passes; its slopes and factors are those of all."""
        own: dict[str, Any] = {name: each[index] for name, each in self.tensors().items()}
        return replace(self, golden_shares=self.golden_shares[index : index + 1], **own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that it has, by name, in the shapes above."""
        named = {name: getattr(self, name) for name in ("tokens", "elements", "real", "weighed")}
        return {name: each for name, each in named.items() if each is not None}


def scales(elements: torch.Tensor) -> torch.Tensor:
    """Return 1 / standard error of each element up to a common factor, float64 [..., element].

    ``elements`` are a floor's, floating [..., way, element].
    """
    mean = elements.double().mean(-2)
    least = _LEAST * mean.mean(-1, keepdim=True)
    # Where no way is off anywhere, no element is known to round more than another.
    return torch.where(mean.sum(-1, keepdim=True) > 0, (mean + least).rsqrt(), 1.0)


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
    one = {name: way.unsqueeze(0) for name, way in ways.items()}
    floors = measure_floors(one, golden.unsqueeze(0), reference.unsqueeze(0), mask, layout)
    return floors.of_pass(0)


@one_thread()
def measure_floors(
    ways: Mapping[str, torch.Tensor],
    golden: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    layout: TokenLayout,
) -> Floor:
    """Return the floors of one site in several passes of one shape, as one with passes in front.

    Shapes are those of `measure_floor`, with the passes in front; ``mask`` is that of each. Short
    passes are measured together: of so few numbers an operation's call takes longer than the sum.
    """
    passes, rows, width = reference.shape
    floors = []
    for some in pieces(passes, rows * len(ways) * width):
        few = _Passes([way[some] for way in ways.values()], golden[some], reference[some], mask)
        floors.append(few.floors(tuple(ways), layout))
    return floors[0] if len(floors) == 1 else _joined(floors)


def group_floor(
    elements: torch.Tensor, weight: torch.Tensor, layout: TokenLayout, grouping: str
) -> torch.Tensor:
    """Return each group's squared floor, scaled, float64 [group].

    ``elements`` are a floor's, floating [way, element], and ``weight`` the squares of their
    `scales`.
    """
    # Each way's own sum comes first: the worst way of each element together is no computation.
    return layout.sums(elements.double() * weight, grouping).amax(0)


@dataclass
class _Passes:
    """Short passes of one site, or a long one: ``ways`` in order, shapes as in `measure_floors`."""

    ways: list[torch.Tensor]
    golden: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor

    def floors(self, names: tuple[str, ...], layout: TokenLayout) -> Floor:
        """Return the floors, with the passes in front; ``names`` are those of the ways."""
        (passes, rows, width), count = self.reference.shape, len(self.ways)
        tokens = torch.zeros(passes, count, rows, dtype=torch.float64)
        elements, products = torch.zeros(2, passes, count, width, dtype=torch.float64)
        squares = torch.zeros(passes, width, dtype=torch.float64)
        goldens = torch.zeros(passes, dtype=torch.float64)
        by_token = torch.zeros(passes, rows, dtype=torch.float64)
        for part, real, wide, values in self._pieces():
            own = self.golden[:, part].double().unsqueeze(1)
            square = wide.square()
            squares += square[:, 0, real].sum(1)
            by_token[:, part] = square[:, 0].sum(2)
            error = (values - wide).square_()
            tokens[:, :, part] = error.sum(3)
            elements += error[:, :, real].sum(2)
            goldens += (own - wide).square_()[:, 0, real].sum((1, 2))
            # The values are of no more use here: they become the products in place, without a copy.
            products += values.sub_(own).mul_(wide)[:, :, real].sum(2)
        slopes = _slopes(products, squares, elements, layout)
        floor = Floor(names, tokens, elements, slopes)
        epsilon = torch.finfo(self.golden.dtype).eps
        # A golden of a shorter type is further off than these ways by its own rounding alone.
        if epsilon <= torch.finfo(self.ways[0].dtype).eps:
            # One rounding moves a number by half an epsilon of it at most.
            least = (epsilon / 2) ** 2 * squares.sum(1)
            # Other weights move a way further than any rounding moves the golden.
            rounding = [not name.startswith(PUBLISHED) for name in names]
            alike = as_many_alike(tokens[:, rounding].mean(1)[:, self.mask]).clamp_min(1.0)
            clean = elements[:, rounding].sum(2).amax(1) * by_chance(alike, width)
            floor.golden_shares = _shares(goldens, clean.maximum(least))
        floor.real = torch.stack([tokens.amax(1), by_token], 1)[:, :, self.mask]
        if rows >= FEW:
            # This reads the tensors again: scales are known once every row is summed.
            errors, floor.factors = self._weighed(scales(elements).square(), layout)
            floor.weighed = errors.amax(1)
            floor.freedom = freedom_among(errors[:, :, self.mask].transpose(0, 1).flatten(1))
        return floor

    def _weighed(
        self, weight: torch.Tensor, layout: TokenLayout
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return each token's weighed errors, and what factors explain of a way's error.

        The errors are float64 [pass, way, batch * token], and so is the ``weight`` [pass, element].
        """
        (passes, rows, _), count = self.reference.shape, len(self.ways)
        errors = torch.zeros(passes, count, rows, dtype=torch.float64)
        shared = {
            each: torch.zeros(passes, count, dtype=torch.float64)
            for each in layout.groupings
            if each != CHANNEL
        }
        spread = weight[:, None, None]
        for part, real, wide, values in self._pieces():
            scaled = wide * spread
            terms, squares = (values.sub_(wide) * scaled)[:, :, real], (wide * scaled)[:, :, real]
            for grouping, parts in shared.items():
                p, q = (layout.sums(each, grouping) for each in (terms, squares))
                parts.add_(explained(p, q, dim=(2, 3)))
            # A product with the weights sums each row without a weighed copy.
            squared = values.square_().flatten(1, 2)
            errors[:, :, part] = (squared @ weight.unsqueeze(2)).view(passes, count, -1)
        total = errors[:, :, self.mask].sum(2).clamp_min(TINY)
        factors = {name: float((each / total).max()) for name, each in shared.items()}
        return errors, factors

    def _pieces(self) -> Iterator[tuple[slice, Any, torch.Tensor, torch.Tensor]]:
        """Yield some rows at a time: where they are, which are real, reference and ways.

        The last two are float64 [pass, 1 or way, row, element]; what picks the real rows copies
        none where it picks them all.
        """
        passes, rows, width = self.reference.shape
        for part in pieces(rows, passes * len(self.ways) * width):
            real = slice(None) if bool(self.mask[part].all()) else self.mask[part]
            wide = self.reference[:, part].double().unsqueeze(1)
            values = wide.new_empty(passes, len(self.ways), *wide.shape[2:])
            # Each way is widened as it is copied: a stack of them would be a copy more.
            for index, way in enumerate(self.ways):
                values[:, index] = way[:, part]
            yield part, real, wide, values


def _shares(own: torch.Tensor, largest: torch.Tensor) -> tuple[float, ...]:
    """Return by pass a golden's error over the largest that is clean; both squares, float64."""
    share = (own / largest.clamp_min(TINY)).sqrt().clamp_max(_MOST)
    # What has no number where clean computations have one is as far off as can be.
    share = share.where(~own.isnan(), _MOST).where(~largest.isnan(), 0.0)
    return tuple(float(f"{each:.4g}") for each in share.reshape(-1).tolist())


def _slopes(
    products: torch.Tensor, squares: torch.Tensor, elements: torch.Tensor, layout: TokenLayout
) -> dict[str, SlopeSample]:
    """Return the slopes of the ways that differ from the golden, of all passes, by grouping.

    ``products`` are each way's sums over tokens of (way - golden) * reference, float64 [pass, way,
    element], ``squares`` [pass, element] those of reference^2, ``elements`` [pass, way, element]
    those of (way - reference)^2.
    """
    weight = scales(elements).square().unsqueeze(1)
    # A way that is the golden is no other way, and has no slope.
    apart = (products.square() * weight / squares.clamp_min(TINY).unsqueeze(1)).sum(2)
    count = int((apart > _SAME * apart.amax(1, keepdim=True)).sum())
    found: dict[str, SlopeSample] = {}
    for grouping in layout.groupings:
        p, q, error = (
            layout.sums(each * weight, grouping)
            for each in (products, squares.unsqueeze(1), elements)
        )
        size = q * error
        # Over the way's own error it is a squared correlation: a noisy way counts as any other.
        slopes = torch.where(size > 0, p.square() / size.clamp_min(TINY), 0.0)
        # Of several groups the largest: some always follow the reference more than others.
        total = float(slopes.amax(2).sum())
        found[grouping] = SlopeSample(total / max(count, 1), count)
    return found


def _joined(floors: Sequence[Floor]) -> Floor:
    """Return floors of further passes each as one, with all passes in front."""
    each = [floor.tensors() for floor in floors]
    tensors: dict[str, Any] = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    slopes, factors = floors[0].slopes, floors[0].factors
    known = [floor.freedom for floor in floors if floor.freedom is not None]
    return replace(
        floors[0],
        golden_shares=tuple(share for floor in floors for share in floor.golden_shares),
        slopes={name: SlopeSample.pooled(one.slopes[name] for one in floors) for name in slopes},
        factors={name: max(one.factors[name] for one in floors) for name in factors},
        # The least freedom: the more floors scatter, the less stands out of them.
        freedom=min(known, default=None),
        **tensors,
    )
