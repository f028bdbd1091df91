"""Chunk: a piece of both tensors, and the numbers that metrics are formulas of."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec

import numpy as np
import torch

from layerparity.metrics import _plain
from layerparity.metrics._numbers import Numbers

# With fewer elements torch is done before numba is imported, or even compiling for the first time.
_WORTH_COMPILING = 1 << 16


class Chunk:
    """Two tensors of one shape, any dtypes; the first axis of two or more is rows."""

    def __init__(self, golden: torch.Tensor, candidate: torch.Tensor) -> None:
        if golden.shape != candidate.shape:
            raise ValueError(f"{list(golden.shape)} against {list(candidate.shape)}")
        self.golden = golden
        self.candidate = candidate
        self.size = golden.numel()

    @cached_property
    def numbers(self) -> Numbers:
        """Sums, counts and extremes over all elements, worked out once, when first asked."""
        return self._measured[0]

    @property
    def row_squares(self) -> np.ndarray:
        """Float64 [2, rows]: sums of golden^2 and of (candidate - golden)^2 in each row.

        Over the row's finite pairs; the latter is Inf in a row with any other.
        """
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[Numbers, np.ndarray]:
        rows = self.golden.shape[0] if self.golden.dim() > 1 else 1
        if not self.size:
            return Numbers(), np.zeros((2, rows))
        golden, candidate = self.golden.reshape(rows, -1), self.candidate.reshape(rows, -1)
        if self.size >= _WORTH_COMPILING and find_spec("numba") is not None:
            from layerparity.metrics import _fused

            if _fused.takes(golden, candidate):
                return _fused.numbers(golden, candidate)
        return _plain.numbers(golden, candidate)
