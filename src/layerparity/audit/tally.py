"""Tally: the statistics of one tensor's values, taken a chunk at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# Between these a variance in float32 neither overflowed nor lost its smallest parts.
_SOUND = (1e-30, 1e30)


class Tally:
    """Counts, mean, standard deviation and range of the finite values of chunks.

    Chunks are merged as Chan, Golub and LeVeque (1983) do, each in float32 where its squares fit
    there, else in float64.
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
        self._merge(flat.numel(), *_moments(flat, least, most))
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
            "mean": self.mean if math.isfinite(self.mean) else None,
            "std": self.std if math.isfinite(self.std) else None,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
            "nan": self.nan,
            "inf": self.inf,
        }


def _moments(flat: torch.Tensor, least: float, most: float) -> tuple[float, float]:
    """Return mean and variance of finite numbers, of which the least and the most are known."""
    if least == most:
        return least, 0.0
    # Two passes that stay in the cache; torch.var_mean takes ten times as long.
    mean = float(flat.sum()) / flat.numel()
    centred = flat - mean
    variance = float(centred.dot(centred)) / flat.numel()
    if flat.itemsize < 8 and not _SOUND[0] < variance < _SOUND[1]:
        return _moments(flat.double(), least, most)
    return mean, variance
