"""Regression: the slope of a difference on a reference, by group, from sums over tokens.

Rounding is nearly independent of the value it rounds; a wrong factor is not. The slope through the
origin of ``difference`` on ``reference`` is that factor, and its error is estimated from the
tokens' own sums: values of one token are not independent of each other (cluster-robust variance,
Liang and Zeger 1986, with the tokens as clusters).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TINY = 1e-300
# Clusters: of fewer, the variance itself is a guess.
FEWEST = 16


@dataclass
class Slopes:
    """Sums over tokens, float64 [groups] each, of P = difference * regressor and Q = regressor^2.

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
        """Add float64 [tokens, groups] of each token's sums."""
        self.p += p.sum(0)
        self.q += q.sum(0)
        self.pp += p.square().sum(0)
        self.pq += (p * q).sum(0)
        self.qq += q.square().sum(0)
        self.tokens += p.shape[0]

    @property
    def slope(self) -> torch.Tensor:
        """Slope of each group, 0 where the regressor is."""
        return self.p / self.q.clamp_min(_TINY)

    @property
    def variance(self) -> torch.Tensor:
        """Variance of each slope with tokens as clusters; Inf of too few tokens to tell."""
        if self.tokens < FEWEST:
            return torch.full_like(self.p, torch.inf)
        slope = self.slope
        squares = self.pp - 2 * slope * self.pq + slope.square() * self.qq
        correction = self.tokens / (self.tokens - 1)
        return correction * squares.clamp_min(0) / self.q.square().clamp_min(_TINY)
