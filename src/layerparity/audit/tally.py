"""Tally: the statistics of one tensor's values, taken a chunk at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Tally:
    """Counts, mean, standard deviation and range of the finite values of chunks.

    Chunks are merged as Chan, Golub and LeVeque (1983) do, each in float32 (float64 for float64).
    """

    def __init__(self) -> None:
        self.count = 0
        self.nan = 0
        self.inf = 0
        self.mean = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._squares = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Add a chunk: a floating tensor of any shape."""
        import torch

        flat = values.reshape(-1)
        if flat.numel() == 0:
            return
        least, most = (float(each) for each in torch.aminmax(flat))
        if not (math.isfinite(least) and math.isfinite(most)):
            nan = int(flat.isnan().sum())
            self.nan += nan
            finite = flat[flat.isfinite()]
            self.inf += flat.numel() - finite.numel() - nan
            self.add(finite)
            return
        # Two passes that stay in the cache; torch.var_mean takes ten times as long.
        mean = float(flat.sum()) / flat.numel()
        centred = flat - mean
        self._merge(flat.numel(), mean, float(centred.dot(centred)) / flat.numel())
        self.least, self.most = min(self.least, least), max(self.most, most)

    def _merge(self, count: int, mean: float, variance: float) -> None:
        total = self.count + count
        shift = mean - self.mean
        self._squares += variance * count + shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation of the finite values; 0 where there are none."""
        return math.sqrt(max(self._squares, 0.0) / self.count) if self.count else 0.0

    @property
    def constant(self) -> bool:
        """Whether there are several values, finite and all the same."""
        broken = self.nan or self.inf
        return not broken and self.count > 1 and self.least == self.most

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "mean": self.mean,
            "std": self.std,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
            "nan": self.nan,
            "inf": self.inf,
        }
