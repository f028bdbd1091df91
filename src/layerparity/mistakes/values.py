"""Test a hypothesis on stored numbers: does it reproduce what the candidate has, to rounding?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of an error, what a hypothesis may leave: less than this part of it, whatever rounding allows.
_LEFT = 0.2
# Steps of the type that right computations are apart by, and the least for wide types.
_STEPS, _LEAST = 2.0, 4e-6
# A token may be off by so many times as much as all are together.
_ONE_TOKEN = 4.0
# Fewer tokens are fitted by anything.
ENOUGH = 4


@dataclass(frozen=True)
class Values:
    """A site's real tokens on both sides, in batch-major order: float64 [token, ...].

    ``step`` is the distance between neighbouring numbers at 1, in the coarser of the two types.
    """

    golden: torch.Tensor
    candidate: torch.Tensor
    step: float

    @property
    def limit(self) -> float:
        """The relative error that is rounding."""
        return max(_STEPS * self.step, _LEAST)

    def shows(self, made: torch.Tensor) -> bool:
        """Say whether numbers [token, ...] are the candidate's to rounding, and not the golden's.

        Each token has to be, for one that is not is no rounding.
        """
        difference = self.candidate - self.golden
        left = self.candidate - made
        return same(self.candidate, made, self.limit) and bool(
            left.norm() < _LEFT * difference.norm()
        )

    def is_golden(self, made: torch.Tensor) -> bool:
        """Say whether numbers [token, ...] are the golden's to rounding."""
        return same(self.golden, made, self.limit)


def same(right: torch.Tensor, made: torch.Tensor, limit: float) -> bool:
    """Say whether two tensors [token, ...] differ by rounding, together and token by token."""
    if right.shape != made.shape or len(right) < ENOUGH or not bool(made.isfinite().all()):
        return False
    off, size = ((x.flatten(1).norm(dim=1)) for x in (right - made, right))
    tokens = off / size.clamp(min=1e-3 * float(size.mean()) or 1.0)
    whole = float(off.norm()) / max(float(size.norm()), 1e-300)
    return whole <= limit and float(tokens.max()) <= _ONE_TOKEN * limit


def best_factor(of: torch.Tensor, to: torch.Tensor) -> float:
    """Return the one factor by which a tensor, of any shape, comes nearest to another."""
    squares = float((of * of).sum())
    return float((of * to).sum()) / squares if squares else 0.0
