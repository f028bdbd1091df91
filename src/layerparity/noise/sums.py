"""Sums: all that a site's deviation is made of, in one pass over small pieces of its tokens.

A piece's float64 values stay in a core's cache, whatever the size of the site: what a comparison
needs beside the stored tensors are a few numbers for each token and each element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding_bag

from layerparity.noise.groups import CHANNEL, HEAD, WHOLE, Layout
from layerparity.noise.regression import Slopes

# Elements of a piece.
PIECE = 1 << 16
# Elements that are summed by expert at once, and such sums.
BLOCK = 1 << 18


def pieces(tokens: int, elements: int) -> Iterator[slice]:
    """Yield ranges of tokens, each of about `PIECE` elements and at least one token."""
    step = max(1, PIECE // max(1, elements))
    for start in range(0, tokens, step):
        yield slice(start, start + step)


@dataclass
class Sums:
    """Float64 sums over judged tokens of candidate c, golden g, reference r and scale s.

    ``error`` is (c - r)^2 and ``square`` r^2, by token and by element; ``own`` (g - r)^2 in all.
    ``slopes`` regress s (c - g) on s r by grouping, ``offset`` s (c - g) on 1. ``products`` and
    ``squares`` are the regression's P and Q of each token, ``differences`` s (c - g) by element.
    """

    error_tokens: torch.Tensor
    square_tokens: torch.Tensor
    error_elements: torch.Tensor
    square_elements: torch.Tensor
    products: torch.Tensor
    squares: torch.Tensor
    differences: torch.Tensor
    slopes: dict[str, Slopes] = field(default_factory=dict)
    offset: Slopes = field(default_factory=lambda: Slopes.start(1))
    own: float = 0.0

    @classmethod
    def start(cls, tokens: int, elements: int) -> Sums:
        """Return empty sums."""
        error, square, products, squares = torch.zeros(4, tokens, dtype=torch.float64)
        errors, all_squares, differences = torch.zeros(3, elements, dtype=torch.float64)
        return cls(error, square, errors, all_squares, products, squares, differences)


def summed(
    candidate: torch.Tensor,
    golden: torch.Tensor,
    reference: torch.Tensor,
    scale: torch.Tensor,
    layout: Layout,
) -> Sums:
    """Return the sums of three floating [tokens, elements]; ``scale`` is float64 [elements]."""
    tokens, elements = candidate.shape
    found = Sums.start(tokens, elements)
    found.slopes = {each: Slopes.start(layout.size(each)) for each in layout.groupings}
    weight = scale.square()
    for rows in pieces(tokens, elements):
        c, g, r = (each[rows].double() for each in (candidate, golden, reference))
        difference = c - g
        error, square = (c - r).square_(), r.square()
        found.error_tokens[rows], found.square_tokens[rows] = error.sum(1), square.sum(1)
        found.error_elements += error.sum(0)
        found.own += float((g - r).square_().sum())
        found.differences += difference.sum(0)
        offsets = (difference @ scale).unsqueeze(1)
        found.offset.add(offsets, torch.full_like(offsets, elements))
        _regress(found, rows, (difference.mul_(r), square), weight, layout)
    found.differences *= scale
    _weigh(found, weight)
    return found


def _regress(
    found: Sums,
    rows: slice,
    sides: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    layout: Layout,
) -> None:
    """Add a piece's (c - g) r and r^2, ``sides``, to the regressions; channels unweighed."""
    products, squares = sides
    found.slopes[CHANNEL].add(products, squares)
    if HEAD in found.slopes:
        each = [layout.sums(values * weight, HEAD) for values in (products, squares)]
        found.slopes[HEAD].add(*each)
        p, q = (values.sum(1) for values in each)
    else:
        p, q = products @ weight, squares @ weight
    found.products[rows], found.squares[rows] = p, q
    found.slopes[WHOLE].add(p.unsqueeze(1), q.unsqueeze(1))


def _weigh(found: Sums, weight: torch.Tensor) -> None:
    sums = found.slopes[CHANNEL]
    found.square_elements += sums.q
    for name, factor in (("p", 1), ("q", 1), ("pp", 2), ("pq", 2), ("qq", 2)):
        getattr(sums, name).mul_(weight**factor)


def apart_by_expert(
    difference: tuple[torch.Tensor, torch.Tensor],
    reference: torch.Tensor,
    weight: torch.Tensor,
    routed: torch.Tensor,
    slope: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over elements of (P - slope Q)^2, P and Q summed over each expert's tokens.

    ``difference`` is (candidate, golden), ``routed`` bool [tokens, experts]; float64 [experts].
    """
    candidate, golden = difference
    wide = max(1, BLOCK // max(1, *routed.shape))
    _, sent = routed.T.nonzero(as_tuple=True)
    counts = routed.sum(0)
    # Each expert's tokens are added where they stand: a product would multiply the others by zero.
    first = counts.cumsum(0) - counts
    found = torch.zeros_like(slope)
    for start in range(0, reference.shape[1], wide):
        columns = slice(start, start + wide)
        c, g, r = (each[:, columns].double() for each in (candidate, golden, reference))
        p = embedding_bag(sent, (c - g).mul_(r), first, mode="sum")
        q = embedding_bag(sent, r.square(), first, mode="sum")
        apart = (p - slope.unsqueeze(1) * q) * weight[columns]
        found += apart.square_().sum(1)
    return found
