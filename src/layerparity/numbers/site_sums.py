"""Sum one site's errors and regressions from its three tensors: compiled, or piece by piece.

Where torch sums, tensors are read in pieces whose float64 values stay in a core's cache, whatever
the size of the site: all that is kept are a few numbers for each token and each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch.nn.functional import embedding_bag

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.token_factors import explained
from layerparity.numbers.token_sums import (
    CHANNEL,
    HEAD,
    WHOLE,
    SiteSums,
    Slopes,
    TokenLayout,
    pieces,
)

Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# With fewer elements torch is done before numba is imported, or even compiling for the first time.
_WORTH_COMPILING = 1 << 16
# Elements that are summed by group at once, and such sums.
BLOCK = 1 << 18


def site_sums(sides: Sides, scale: torch.Tensor, layout: TokenLayout) -> SiteSums:
    """Return the sums of candidate, golden and reference, three floating [token, element].

    ``scale`` is float64 [element].
    """
    if _worth_compiling(sides):
        from layerparity.numbers import fused_site

        if fused_site.takes(sides):
            return fused_site.fused_site_sums(sides, scale, layout)
    return plain_site_sums(sides, scale, layout)


def apart_by_group(
    sides: Sides, weight: torch.Tensor, groups: Sequence[torch.Tensor], slope: torch.Tensor
) -> torch.Tensor:
    """Return the sum over elements of (P - slope Q)^2, P and Q summed over each group's tokens.

    P and Q are (c - g) r and r^2, weighed, of ``sides`` as in `site_sums`. ``weight`` is float64
    [element], a group int64 [token of it]; ``slope`` and the result are float64 [group].
    """
    if _worth_compiling(sides):
        from layerparity.numbers import fused_site

        if fused_site.takes(sides):
            return fused_site.fused_apart(sides, weight, groups, slope)
    return plain_apart(sides, weight, groups, slope)


def _worth_compiling(sides: Sides) -> bool:
    return sides[0].numel() >= _WORTH_COMPILING and find_spec("numba") is not None


@one_thread()
def plain_site_sums(sides: Sides, scale: torch.Tensor, layout: TokenLayout) -> SiteSums:
    """Return what `site_sums` does, by torch in float64; ``sides`` are of any floating types."""
    candidate, golden, reference = sides
    tokens, elements = candidate.shape
    sums = SiteSums.start(tokens, elements)
    sums.slopes = {each: Slopes.start(layout.size(each)) for each in layout.groupings}
    sums.shared = {each: torch.zeros_like(sums.weighed) for each in sums.slopes if each != CHANNEL}
    weight = scale.square()
    for rows in pieces(tokens, elements):
        c, g, r = (each[rows].double() for each in (candidate, golden, reference))
        difference, off = c - g, c - r
        shared, square = off * r, r.square()
        error = off.square_()
        sums.weighed[rows] = error @ weight
        sums.error_tokens[rows], sums.square_tokens[rows] = error.sum(1), square.sum(1)
        sums.error_elements += error.sum(0)
        sums.own += float((g - r).square_().sum())
        sums.differences += difference.sum(0)
        offsets = (difference @ scale).unsqueeze(1)
        sums.offset.add(offsets, torch.full_like(offsets, elements))
        _regress(sums, rows, (difference.mul_(r), square, shared), weight, layout)
    sums.differences *= scale
    # What channels regress on is r^2: it is summed once for both.
    sums.square_elements += sums.slopes[CHANNEL].q
    # Until here the channels' terms are not weighed.
    sums.slopes[CHANNEL] = sums.slopes[CHANNEL].scaled(weight)
    return sums


def _regress(
    sums: SiteSums,
    rows: slice,
    sides: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    layout: TokenLayout,
) -> None:
    """Add a piece's (c - g) r, r^2 and (c - r) r to the regressions; channels unweighed."""
    products, squares, shared = sides
    sums.slopes[CHANNEL].add(products, squares)
    if HEAD in sums.slopes:
        each = [layout.sums(values * weight, HEAD) for values in sides]
        sums.slopes[HEAD].add(*each[:2])
        sums.shared[HEAD][rows] = explained(each[2], each[1], dim=1)
        p, q, of_all = (values.sum(1) for values in each)
    else:
        # A product weighs and adds at once, without a weighed copy.
        p, q, of_all = products @ weight, squares @ weight, shared @ weight
    sums.shared[WHOLE][rows] = explained(of_all.unsqueeze(1), q.unsqueeze(1), dim=1)
    sums.products[rows], sums.squares[rows] = p, q
    sums.slopes[WHOLE].add(p.unsqueeze(1), q.unsqueeze(1))


@one_thread()
def plain_apart(
    sides: Sides, weight: torch.Tensor, groups: Sequence[torch.Tensor], slope: torch.Tensor
) -> torch.Tensor:
    """Return what `apart_by_group` does, by torch in float64."""
    # Tokens of other groups are not read.
    used, sent = torch.unique(torch.cat(tuple(groups)), return_inverse=True)
    counts = torch.tensor([each.numel() for each in groups])
    # Each group's tokens are added where they stand: a product would multiply the others by zero.
    first = counts.cumsum(0) - counts
    sums = torch.zeros_like(slope)
    wide = max(1, BLOCK // max(1, used.numel(), len(groups)))
    for start in range(0, weight.numel(), wide):
        columns = slice(start, start + wide)
        c, g, r = (each[:, columns].index_select(0, used).double() for each in sides)
        p = embedding_bag(sent, (c - g).mul_(r), first, mode="sum")
        q = embedding_bag(sent, r.square(), first, mode="sum")
        apart = (p - slope.unsqueeze(1) * q) * weight[columns]
        sums += apart.square_().sum(1)
    return sums
