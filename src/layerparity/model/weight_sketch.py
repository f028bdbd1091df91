"""Sum up a weight in a few numbers: statistics, and a sketch that tells what became of it.

The sketch is a count sketch (Charikar, Chen, Farach-Colton 2002) of the values less their mean.
Sketches of two tensors tell by their angle whether one is the other changed a little, reordered, or
something else.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch

BUCKETS = 64
# Values that are float32 or float64 at one time: a large tensor never is.
CHUNK = 1 << 16


class ValueSums:
    """Sums over a tensor's chunks of `CHUNK` values, in float64."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._low, self._high = float("inf"), float("-inf")
        self._sketch = torch.zeros(BUCKETS, dtype=torch.float64)
        self._signs = torch.zeros(BUCKETS, dtype=torch.float64)

    def add(self, index: int, chunk: torch.Tensor) -> None:
        """Add a tensor's chunk number ``index``: [value], floating, at most `CHUNK` of them."""
        wide = chunk.float()
        values = wide.double()
        self._count += values.numel()
        self._sum += float(values.sum())
        self._squares += float(values.dot(values))
        low, high = wide.aminmax()
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        signs, turn = _signs()[: values.numel()], _pseudo_random(f"chunk {index}", BUCKETS)
        self._sketch += turn * _buckets(wide * signs)
        self._signs += turn * (_full_signs() if values.numel() == CHUNK else _buckets(signs))

    def stats(self) -> dict[str, float]:
        """Return mean, std, min, max and l2; zeros for no values."""
        count = max(self._count, 1)
        mean = self._sum / count
        spread = max(self._squares / count - mean * mean, 0.0) ** 0.5
        ends = (self._low, self._high) if self._count else (0.0, 0.0)
        return {
            "mean": mean,
            "std": spread,
            "min": ends[0],
            "max": ends[1],
            "l2": self._squares**0.5,
        }

    def sketch(self) -> tuple[float, ...]:
        """Return the sketch, at most as many numbers as there were values."""
        centred = self._sketch - self._signs * (self._sum / max(self._count, 1))
        kept = centred[: self._count].tolist()
        return tuple(float(f"{value:.5g}") for value in kept)


def _buckets(signed: torch.Tensor) -> torch.Tensor:
    """Sum a chunk, its elements multiplied by their signs, into its buckets."""
    left = -signed.numel() % BUCKETS
    padded = torch.nn.functional.pad(signed, (0, left)) if left else signed
    return padded.view(-1, BUCKETS).sum(dim=0).double()


@cache
def _full_signs() -> torch.Tensor:
    return _buckets(_signs())


@cache
def _signs() -> torch.Tensor:
    return _pseudo_random("element", CHUNK)


def _pseudo_random(seed: str, count: int) -> torch.Tensor:
    """Return +1 and -1, float32, from a standard's bits: the same everywhere and for ever."""
    raw = hashlib.shake_256(seed.encode()).digest(count // 8)
    octets = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    bits = (octets.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1).float() * 2 - 1
