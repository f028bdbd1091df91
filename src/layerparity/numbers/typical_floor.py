"""Typical noise floor of one token at a site, pooled over the prefill and all decode steps.

The floor of a single token is a single draw. Its numbers share a norm and a softmax, and a massive
channel may outweigh all others: then its error is one number's, now and then near zero by luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

# Of fewer tokens, nothing is typical.
_FEWEST = 4
# Clean tokens are no noisier than this quantile of them, but for the unlucky.
_HIGH = 0.9
# The quantile of the normal distribution there.
_NORMAL = 1.2816
# What is typical counts as much as this many independent numbers of the token itself.
SHARED = 16
# So many times too large, squared, the floor of a few numbers may be by luck, and no more.
LUCKY = 4.0
Values = npt.NDArray[np.float64]
Square = TypeVar("Square", float, torch.Tensor)


@dataclass(frozen=True)
class TypicalFloor:
    """The squared floor of an unlucky token, as it is and over the token's squares.

    ``freedom`` is how many independent numbers a token's floor is worth (degrees of freedom): 1
    where one channel outweighs the rest, Inf where all tokens have the same.
    """

    absolute: float
    relative: float
    freedom: float

    @classmethod
    def of(cls, floors: torch.Tensor, squares: torch.Tensor) -> TypicalFloor | None:
        """Return what is typical of clean tokens; None of too few.

        ``floors`` and ``squares`` are float64 [token]: each one's squared floor, and the sum of
        squares of its reference.
        """
        if floors.numel() < _FEWEST:
            return None
        relative = floors[squares > 0] / squares[squares > 0]
        # Noise goes with a token's size, or it does not: whatever explains more of it.
        freedom = max(degrees_of_freedom(floors), degrees_of_freedom(relative))
        return cls(_high(floors), _high(relative), freedom)

    def of_tokens(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the squared floor of unlucky tokens of these squares; both float64 [token]."""
        return (self.relative * squares).clamp_min(self.absolute)

    def raised_to_typical(self, own: Square, typical: Square, freedom: float) -> Square:
        """Return a squared floor, drawn towards the typical one where it is below it.

        Both are of one token, or float64 [token]. ``freedom`` is how many independent numbers
        ``own`` is worth; the typical floor is worth `SHARED`.
        """
        drawn = (freedom * own + SHARED * typical) / (freedom + SHARED)
        if isinstance(own, torch.Tensor):
            return torch.maximum(own, torch.as_tensor(drawn))
        return max(own, drawn)


def _high(values: torch.Tensor) -> float:
    return _quantiles(values.numpy(), _HIGH)[0] if values.numel() else 0.0


def _quantiles(values: Values, *wanted: float) -> list[float]:
    """Return quantiles of float64 [value], between two values in proportion.

    Of few values torch takes longer for one than it takes to sort them.
    """
    ordered = np.sort(values)
    # NaN is sorted last: one is enough to leave no quantile.
    if np.isnan(ordered[-1]):
        return [math.nan] * len(wanted)
    found = []
    for each in wanted:
        place = each * (len(ordered) - 1)
        below = int(place)
        low, high = float(ordered[below]), float(ordered[math.ceil(place)])
        part, whole = place - below, high - low
        # From the nearer of the two, as the interpolations of numpy and torch go.
        found.append(low + part * whole if part < 0.5 else high - whole * (1 - part))
    return found


def degrees_of_freedom(values: torch.Tensor | Values) -> float:
    """Return the degrees of freedom of chi-squared values, by the ratio of two quantiles.

    The values are float64 [value]. Of few of them the upper quantile is far above the median. By
    the cube root's normal approximation (Wilson and Hilferty 1931), with ``a = 2 / (9 df)``, the
    cube root of the ratio is ``1 + z sqrt(a) / (1 - a)``.
    """
    seen = np.asarray(values)
    # Zeros are no draws of a chi-squared number: nothing rounded there.
    kept = seen[seen > 0]
    if len(kept) < _FEWEST:
        return math.inf
    high, median = _quantiles(kept, _HIGH, 0.5)
    ratio = high / median
    over = (ratio ** (1 / 3) - 1) / _NORMAL
    if over <= 0:
        return math.inf
    # The positive root s of over (1 - s^2) = s, with s^2 = a = 2 / (9 df).
    root = (math.sqrt(1 + 4 * over**2) - 1) / (2 * over)
    return 2 / (9 * root**2) if root > 0 else math.inf
