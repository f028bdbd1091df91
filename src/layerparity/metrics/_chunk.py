"""Chunk: a piece of both tensors, and the numbers that more than one metric needs of it."""

from __future__ import annotations

import math
from functools import cached_property

import torch


class Chunk:
    """Two tensors of one shape, any dtypes. Everything below is worked out once, when first asked.

    All numbers are float64 and over the pairs that are finite on both sides.
    """

    def __init__(self, golden: torch.Tensor, candidate: torch.Tensor) -> None:
        if golden.shape != candidate.shape:
            raise ValueError(f"{list(golden.shape)} against {list(candidate.shape)}")
        self.golden = golden
        self.candidate = candidate
        self.size = golden.numel()

    @cached_property
    def golden64(self) -> torch.Tensor:
        """The golden's values, flat."""
        return self._float64[0]

    @cached_property
    def candidate64(self) -> torch.Tensor:
        """The candidate's values, flat."""
        return self._float64[1]

    @cached_property
    def diff(self) -> torch.Tensor:
        """Candidate - golden, flat."""
        return self._float64[2]

    @cached_property
    def finite(self) -> torch.Tensor | None:
        """Which pairs are finite on both sides, flat; None where all are."""
        return self._float64[3]

    @cached_property
    def _float64(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        golden = self.golden.reshape(-1).double()
        candidate = self.candidate.reshape(-1).double()
        diff = candidate - golden
        # One NaN or Inf on either side makes this sum so: the usual case costs no pass of its own.
        if math.isfinite(_dot(diff, diff)):
            return golden, candidate, diff, None
        mask = torch.isfinite(golden) & torch.isfinite(candidate)
        return golden[mask], candidate[mask], diff[mask], mask

    @cached_property
    def abs_diff(self) -> torch.Tensor:
        """|candidate - golden|, flat."""
        return self.diff.abs()

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one side flat, in its own dtype, without the pairs that are not finite."""
        flat = tensor.reshape(-1)
        return flat if self.finite is None else flat[self.finite]

    @cached_property
    def count(self) -> int:
        """Number of pairs that are finite on both sides."""
        return self.diff.numel()

    @cached_property
    def golden_squares(self) -> float:
        """Sum of golden^2."""
        return _dot(self.golden64, self.golden64)

    @cached_property
    def candidate_squares(self) -> float:
        """Sum of candidate^2."""
        return _dot(self.candidate64, self.candidate64)

    @cached_property
    def diff_squares(self) -> float:
        """Sum of (candidate - golden)^2."""
        return _dot(self.diff, self.diff)

    @cached_property
    def golden_diff(self) -> float:
        """Sum of golden * (candidate - golden)."""
        return _dot(self.golden64, self.diff)

    @cached_property
    def abs_diff_sum(self) -> float:
        """Sum of |candidate - golden|."""
        return float(self.abs_diff.sum())


def _dot(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.dot(left, right))
