"""Sums of one site's errors and regressions, by token and by group: whole, by head, by channel.

Rounding is nearly independent of the value it rounds; a wrong factor is not. The slope through the
origin of ``difference`` on ``reference`` is that factor, and its error is estimated from the
tokens' own sums: values of one token are not independent of each other (cluster-robust variance,
Liang and Zeger 1986, with the tokens as clusters).

`site_sums` makes them from tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

WHOLE, HEAD, CHANNEL = "whole", "head", "channel"
# Clusters: of fewer, the variance itself is a guess.
FEWEST = 16
# Elements of a piece.
# Their float64 values stay in a core's cache.
PIECE = 1 << 16
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
        by_head: torch.Tensor = values.unflatten(-1, (self.heads, -1))
        return by_head.sum(-1)


def heads_of(sites: Iterable[tuple[str, tuple[int, ...], tuple[str, ...]]]) -> dict[str, int]:
    """Count the heads of ``q``, ``k`` and ``v``, as far as rotated queries and keys show them.

    ``sites`` are (end, shape, axes) of a block's sites.
    """
    counts = {
        end[0]: shape[axes.index("head")]
        for end, shape, axes in sites
        if end in ("q_rotated", "k_rotated") and "head" in axes
    }
    # Values are not rotated, but each has its key: they have the keys' heads.
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
    # Channels that do not divide evenly are not laid out in these heads.
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

    @classmethod
    def of(cls, p: torch.Tensor, q: torch.Tensor) -> Slopes:
        """Return the sums of each token's P and Q, float64 [token, group]."""
        slopes = cls.start(p.shape[1])
        slopes.add(p, q)
        return slopes

    def scaled(self, weight: torch.Tensor) -> Slopes:
        """Return the sums with each group's P and Q scaled by ``weight``, float64 [group]."""
        pp, pq, qq = (each * weight.square() for each in (self.pp, self.pq, self.qq))
        return Slopes(self.p * weight, self.q * weight, pp, pq, qq, self.tokens)

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
        # The sum of (P - slope Q)^2, multiplied out: the slope is known after the last token only.
        squares = self.pp - 2 * slope * self.pq + slope.square() * self.qq
        correction = self.tokens / (self.tokens - 1)
        # What was multiplied out may cancel to less than nothing.
        return correction * squares.clamp_min(0) / self.q.square().clamp_min(_TINY)


def pieces(tokens: int, elements: int) -> Iterator[slice]:
    """Yield ranges of tokens, each of about `PIECE` elements and at least one token."""
    step = max(1, PIECE // max(1, elements))
    for start in range(0, tokens, step):
        yield slice(start, start + step)


@dataclass(frozen=True)
class Sent:
    """Which tokens each expert was sent: int64 ``tokens`` [pair], an expert's behind another's.

    ``experts``, int64 [pair], are whose they are; ``counts``, int64 [expert], how many each has.
    """

    tokens: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, routed: torch.Tensor) -> Sent:
        """Return what bool [token, expert] says."""
        # Transposed, since nonzero goes by rows: an expert's tokens come together.
        experts, tokens = routed.T.contiguous().nonzero(as_tuple=True)
        return cls(tokens, experts, torch.bincount(experts, minlength=routed.shape[1]))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of values, float64 [token], over the tokens of each expert, [expert]."""
        sums = torch.zeros(len(self.counts), dtype=torch.float64)
        return sums.index_add_(0, self.experts, values[self.tokens])

    def groups(self, experts: Iterable[int]) -> list[torch.Tensor]:
        """Return the tokens of each of some experts, int64 [token of it]."""
        ends, counts = self.counts.cumsum(0).tolist(), self.counts.tolist()
        return [self.tokens[ends[each] - counts[each] : ends[each]] for each in experts]


@dataclass
class SiteSums:
    """Float64 sums over judged tokens of candidate c, golden g, reference r and scale s.

    ``error`` is (c - r)^2 and ``square`` r^2, by [token] and by [element]; ``own`` (g - r)^2 in
    all. ``slopes`` regress s (c - g) on s r by grouping, ``offset`` s (c - g) on 1. ``products``
    and ``squares``, [token], are the regression's P and Q, ``differences``, [element], s (c - g).
    ``weighed``, [token], is (s (c - r))^2, of which one factor for the token (of each head)
    explains ``shared``, [token], by grouping.
    """

    error_tokens: torch.Tensor
    square_tokens: torch.Tensor
    error_elements: torch.Tensor
    square_elements: torch.Tensor
    products: torch.Tensor
    squares: torch.Tensor
    differences: torch.Tensor
    weighed: torch.Tensor
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    slopes: dict[str, Slopes] = field(default_factory=dict)
    offset: Slopes = field(default_factory=lambda: Slopes.start(1))
    own: float = 0.0

    @classmethod
    def start(cls, tokens: int, elements: int) -> SiteSums:
        """Return empty sums."""
        error, square, p, q, weighed = torch.zeros(5, tokens, dtype=torch.float64)
        errors, all_squares, differences = torch.zeros(3, elements, dtype=torch.float64)
        return cls(error, square, errors, all_squares, p, q, differences, weighed)
