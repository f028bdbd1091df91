"""Usual: the floor of a token of a site as a rule, by its prefill and all its decode steps.

The floor of a single token is a single draw. Its numbers share a norm and a softmax, and a massive
channel may outweigh all others: then its error is one number's, now and then near zero by luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

# Of fewer tokens, nothing is usual.
_FEWEST = 4
# Clean tokens are no noisier than this quantile of them, but for the unlucky.
_HIGH = 0.9
# The quantile of the normal distribution there.
_NORMAL = 1.2816
# What is usual counts as much as this many independent numbers of the token itself.
SHARED = 16
Floor = TypeVar("Floor", float, torch.Tensor)


@dataclass(frozen=True)
class Usual:
    """The squared floor of an unlucky token, as it is and over the token's squares.

    ``numbers`` is how many independent numbers a token's floor is worth: 1 where one channel
    outweighs the rest, Inf where all tokens have the same.
    """

    absolute: float
    relative: float
    numbers: float

    @classmethod
    def of(cls, floors: torch.Tensor, squares: torch.Tensor) -> Usual | None:
        """Return what is usual, from float64 [tokens] each; None of too few tokens."""
        if floors.numel() < _FEWEST:
            return None
        relative = floors[squares > 0] / squares[squares > 0]
        # Noise goes with a token's size, or it does not: whatever explains more of it.
        numbers = max(_numbers(floors), _numbers(relative))
        return cls(_high(floors), _high(relative), numbers)

    def floors(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the floor of unlucky tokens with these squares, float64 [tokens]."""
        return (self.relative * squares).clamp_min(self.absolute)

    def lifted(self, own: Floor, usual: Floor, numbers: float) -> Floor:
        """Return a floor worth so many numbers, drawn up to the usual one if it is below it."""
        drawn = (numbers * own + SHARED * usual) / (numbers + SHARED)
        if isinstance(own, torch.Tensor):
            return torch.maximum(own, torch.as_tensor(drawn))
        return max(own, drawn)


def _high(values: torch.Tensor) -> float:
    return float(torch.quantile(values, _HIGH)) if values.numel() else 0.0


def _numbers(values: torch.Tensor) -> float:
    """Return the degrees of freedom of chi-squared values, by the ratio of two quantiles.

    Of few of them the upper quantile is far above the median. By the cube root's normal
    approximation (Wilson and Hilferty 1931), with ``a = 2 / (9 df)``, the cube root of the ratio is
    ``1 + z sqrt(a) / (1 - a)``.
    """
    kept = values[values > 0]
    if kept.numel() < _FEWEST:
        return math.inf
    ratio = _high(kept) / float(torch.quantile(kept, 0.5))
    over = (ratio ** (1 / 3) - 1) / _NORMAL
    if over <= 0:
        return math.inf
    root = (math.sqrt(1 + 4 * over**2) - 1) / (2 * over)
    return 2 / (9 * root**2) if root > 0 else math.inf
