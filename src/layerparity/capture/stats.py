"""Statistics of one tensor, on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Values that are float64 at one time: they stay in a core's cache.
CHUNK = 1 << 16


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Return mean, std (population), min, max, l2, rms and the counts of NaN and Inf.

    Moments cover the finite elements, accumulated in float64 a chunk at a time, so that nothing
    of the tensor's size is allocated; an empty tensor, or one without a finite element, has zeros.
    """
    from layerparity.numerics.threads import one_thread

    flat = tensor.detach().reshape(-1)
    tally = _Tally()
    with one_thread():
        for chunk in flat.split(CHUNK) if flat.numel() else ():
            tally.add(chunk)
    return tally.described()


class _Tally:
    """Sums over chunks, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0, 0.0, 0.0
        self.low, self.high = float("inf"), float("-inf")
        self.nan = self.inf = 0

    def add(self, chunk: torch.Tensor) -> None:
        import torch

        values = chunk.to(torch.float64)
        total = float(values.sum())
        # A finite sum has finite terms; one that is not may still have them, in float64.
        if not math.isfinite(total):
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
            values = values[values.isfinite()]
            total = float(values.sum())
        if values.numel():
            self.count += values.numel()
            self.total += total
            self.square += float(values.dot(values))
            low, high = values.aminmax()
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def described(self) -> dict[str, float]:
        count = self.count
        mean = self.total / count if count else 0.0
        variance = max(self.square / count - mean * mean, 0.0) if count else 0.0
        return {
            "mean": mean,
            "std": variance**0.5,
            "min": self.low if count else 0.0,
            "max": self.high if count else 0.0,
            "l2": self.square**0.5,
            "rms": (self.square / count) ** 0.5 if count else 0.0,
            "nan": float(self.nan),
            "inf": float(self.inf),
        }
