"""Sum one site's errors and regressions by token and by group: whole, by head, by channel.

Rounding is nearly independent of the value it rounds; a wrong factor is not. The slope through the
origin of ``difference`` on ``reference`` is that factor, and its error is estimated from the
tokens' own sums: values of one token are not independent of each other (cluster-robust variance,
Liang and Zeger 1986, with the tokens as clusters).

Tensors are read in pieces whose float64 values stay in a core's cache, whatever the size of the
site: all that is kept are a few numbers for each token and each element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding_bag

from layerparity.numbers.token_factors import explained

WHOLE, HEAD, CHANNEL = "whole", "head", "channel"
# Clusters: of fewer, the variance itself is a guess.
FEWEST = 16
# Elements of a piece.
PIECE = 1 << 16
# Elements that are summed by expert at once, and such sums.
BLOCK = 1 << 18
_TINY = 1e-300


@dataclass(frozen=True)
class TokenLayout:
    """How one token of a site's tensor [batch, token, ...] is laid out: its elements, in heads.

    ``heads`` is 0 where the elements are no heads.
    """

    elements: int
    heads: int

    @property
    def groupings(self) -> tuple[str, ...]:
        """The groupings that mean something here."""
        return (WHOLE, HEAD, CHANNEL) if self.heads > 1 else (WHOLE, CHANNEL)

    def size(self, grouping: str) -> int:
        """Return the number of groups of a grouping."""
        return {WHOLE: 1, HEAD: self.heads, CHANNEL: self.elements}[grouping]

    def sums(self, values: torch.Tensor, grouping: str) -> torch.Tensor:
        """Return the sums over each group of [..., element] as [..., group], of the same dtype."""
        if grouping == CHANNEL:
            return values
        if grouping == WHOLE:
            return values.sum(-1, keepdim=True)
        return values.unflatten(-1, (self.heads, -1)).sum(-1)


def heads_of(sites: Iterable[tuple[str, tuple[int, ...], tuple[str, ...]]]) -> dict[str, int]:
    """Count the heads of ``q``, ``k`` and ``v``, as far as rotated queries and keys show them.

    ``sites`` are (end, shape, axes) of a block's sites.
    """
    counts = {
        end[0]: shape[axes.index("head")]
        for end, shape, axes in sites
        if end in ("q_rotated", "k_rotated") and "head" in axes
    }
    return counts | ({"v": counts["k"]} if "k" in counts else {})


def token_layout(
    shape: tuple[int, ...], axes: tuple[str, ...], local: str, heads: dict[str, int]
) -> TokenLayout:
    """Return the layout of a site from its tensor's shape and its axes' names.

    ``local`` is its address inside the block; ``heads`` counts the heads of ``q``, ``k``, ``v``.
    """
    elements = 1
    for size, axis in zip(shape, axes, strict=True):
        elements *= 1 if axis in ("batch", "token") else size
    if "head" in axes:
        return TokenLayout(elements, shape[axes.index("head")])
    count = next((n for part, n in heads.items() if local.startswith(f"self_attn.{part}_")), 0)
    return TokenLayout(elements, count if count and elements % count == 0 else 0)


@dataclass
class Slopes:
    """Sums over tokens, float64 [group] each, of P = difference * regressor and Q = regressor^2.

    ``tokens`` counts the clusters.
    """

    p: torch.Tensor
    q: torch.Tensor
    pp: torch.Tensor
    pq: torch.Tensor
    qq: torch.Tensor
    tokens: int = 0

    @classmethod
    def start(cls, groups: int) -> Slopes:
        """Return empty sums."""
        p, q, pp, pq, qq = torch.zeros(5, groups, dtype=torch.float64)
        return cls(p, q, pp, pq, qq)

    def add(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Add each token's P and Q, float64 [token, group]."""
        self.p += p.sum(0)
        self.q += q.sum(0)
        self.pp += p.square().sum(0)
        self.pq += (p * q).sum(0)
        self.qq += q.square().sum(0)
        self.tokens += p.shape[0]

    @property
    def slope(self) -> torch.Tensor:
        """Slope of each group, float64 [group]; 0 where the regressor is."""
        return self.p / self.q.clamp_min(_TINY)

    @property
    def variance(self) -> torch.Tensor:
        """Variance of each slope, float64 [group], with tokens as clusters; Inf of too few to tell.

        Liang and Zeger 1986, with the correction n / (n - 1) for n clusters.
        """
        if self.tokens < FEWEST:
            return torch.full_like(self.p, torch.inf)
        slope = self.slope
        squares = self.pp - 2 * slope * self.pq + slope.square() * self.qq
        correction = self.tokens / (self.tokens - 1)
        return correction * squares.clamp_min(0) / self.q.square().clamp_min(_TINY)


def pieces(tokens: int, elements: int) -> Iterator[slice]:
    """Yield ranges of tokens, each of about `PIECE` elements and at least one token."""
    step = max(1, PIECE // max(1, elements))
    for start in range(0, tokens, step):
        yield slice(start, start + step)


@dataclass
class SiteSums:
    """Float64 sums over judged tokens of candidate c, golden g, reference r and scale s.

    ``error`` is (c - r)^2 and ``square`` r^2, by [token] and by [element]; ``own`` (g - r)^2 in
    all. ``slopes`` regress s (c - g) on s r by grouping, ``offset`` s (c - g) on 1. ``products``
    and ``squares``, [token], are the regression's P and Q, ``differences``, [element], s (c - g).
    ``weighed``, [token], is (s (c - r))^2, of which one factor for each token (of each head)
    explains ``shared``, by grouping.
    """

    error_tokens: torch.Tensor
    square_tokens: torch.Tensor
    error_elements: torch.Tensor
    square_elements: torch.Tensor
    products: torch.Tensor
    squares: torch.Tensor
    differences: torch.Tensor
    weighed: torch.Tensor
    shared: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, Slopes] = field(default_factory=dict)
    offset: Slopes = field(default_factory=lambda: Slopes.start(1))
    own: float = 0.0

    @classmethod
    def start(cls, tokens: int, elements: int) -> SiteSums:
        """Return empty sums."""
        error, square, p, q, weighed = torch.zeros(5, tokens, dtype=torch.float64)
        errors, all_squares, differences = torch.zeros(3, elements, dtype=torch.float64)
        return cls(error, square, errors, all_squares, p, q, differences, weighed)


def site_sums(
    candidate: torch.Tensor,
    golden: torch.Tensor,
    reference: torch.Tensor,
    scale: torch.Tensor,
    layout: TokenLayout,
) -> SiteSums:
    """Return the sums of three floating [token, element]; ``scale`` is float64 [element]."""
    tokens, elements = candidate.shape
    sums = SiteSums.start(tokens, elements)
    sums.slopes = {each: Slopes.start(layout.size(each)) for each in layout.groupings}
    sums.shared = dict.fromkeys([each for each in layout.groupings if each != CHANNEL], 0.0)
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
    channels = sums.slopes[CHANNEL]
    sums.square_elements += channels.q
    # Until here the channels' terms are not weighed.
    for name, factor in (("p", 1), ("q", 1), ("pp", 2), ("pq", 2), ("qq", 2)):
        getattr(channels, name).mul_(weight**factor)
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
        sums.shared[HEAD] += float(explained(each[2], each[1]))
        p, q, of_all = (values.sum(1) for values in each)
    else:
        p, q, of_all = products @ weight, squares @ weight, shared @ weight
    sums.shared[WHOLE] += float(explained(of_all, q))
    sums.products[rows], sums.squares[rows] = p, q
    sums.slopes[WHOLE].add(p.unsqueeze(1), q.unsqueeze(1))


def apart_by_expert(
    difference: tuple[torch.Tensor, torch.Tensor],
    reference: torch.Tensor,
    weight: torch.Tensor,
    routed: torch.Tensor,
    slope: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over elements of (P - slope Q)^2, P and Q summed over each expert's tokens.

    ``difference`` is (candidate, golden), which are floating [token, element] like ``reference``;
    ``weight`` is float64 [element], ``routed`` bool [token, expert], ``slope`` and the result
    float64 [expert].
    """
    candidate, golden = difference
    wide = max(1, BLOCK // max(1, *routed.shape))
    _, sent = routed.T.nonzero(as_tuple=True)
    counts = routed.sum(0)
    # Each expert's tokens are added where they stand: a product would multiply the others by zero.
    first = counts.cumsum(0) - counts
    sums = torch.zeros_like(slope)
    for start in range(0, reference.shape[1], wide):
        columns = slice(start, start + wide)
        c, g, r = (each[:, columns].double() for each in (candidate, golden, reference))
        p = embedding_bag(sent, (c - g).mul_(r), first, mode="sum")
        q = embedding_bag(sent, r.square(), first, mode="sum")
        apart = (p - slope.unsqueeze(1) * q) * weight[columns]
        sums += apart.square_().sum(1)
    return sums
