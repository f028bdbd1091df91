"""The golden's own slopes: a factor that it is off by is no mistake of whoever has it not."""

from __future__ import annotations

from functools import cached_property

import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.token_sums import TokenLayout, pieces

# Smaller slopes, and less significant ones, are nobody's mistake.
_LEAST, _SIGNIFICANT = 1e-4, 3.0
# Of thousands of groups, one is as significant as that by chance.
_MANY, _SIGNIFICANT_OF_MANY = 64, 5.0
# The golden's part of a slope from which on it is told apart.
_MOST = 0.5


class GoldenSlopes:
    """Slopes of (golden - reference) on the reference, weighed; summed when first asked for.

    ``golden`` and ``reference`` are floating [token, element], ``scale`` float64 [element].
    """

    def __init__(self, golden: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> None:
        self._sides, self._scale = (golden, reference), scale

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums of weighed products by element and by token, and of weighed errors by token."""
        tokens, elements = self._sides[0].shape
        by_element = torch.zeros(elements, dtype=torch.float64)
        by_token, offsets = torch.zeros(2, tokens, dtype=torch.float64)
        weight = self._scale.square()
        with one_thread():
            for rows in pieces(tokens, elements):
                golden, reference = (each[rows].double() for each in self._sides)
                error = golden - reference
                # First the offset, since the products take the error's memory.
                offsets[rows] = error @ self._scale
                products = error.mul_(reference).mul_(weight)
                by_element += products.sum(0)
                by_token[rows] = products.sum(1)
        return by_element, by_token, offsets

    def products(self, layout: TokenLayout, grouping: str) -> torch.Tensor:
        """Return the sums of weighed products over each group of a grouping, float64 [group]."""
        return layout.sums(self._sums[0], grouping)

    @property
    def by_token(self) -> torch.Tensor:
        """The sums of weighed products, float64 [token]."""
        return self._sums[1]

    @property
    def offset(self) -> torch.Tensor:
        """The sum of weighed errors, float64 [1]."""
        return self._sums[2].sum().reshape(1)


def may_be_a_mistake(slope: torch.Tensor, z: torch.Tensor) -> bool:
    """Say whether any group's slope is large and significant enough to be one; both [group]."""
    enough = _SIGNIFICANT_OF_MANY if z.numel() > _MANY else _SIGNIFICANT
    return bool(((slope.abs() > _LEAST) & (z > enough)).any())


def without_golden(slope: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return slopes of (candidate - golden), [group], less what is the golden's ``own``.

    That is taken off where it is the greater part: the candidate is nearer to the reference.
    """
    # Their sum is the slope of (candidate - reference).
    off = slope + own
    return torch.where(off.abs() < _MOST * slope.abs(), off, slope)
