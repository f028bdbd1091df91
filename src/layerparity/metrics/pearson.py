"""Pearson correlation of both tensors' elements, never outside -1 to 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from layerparity.metrics.base import Chunk
from layerparity.site import Kind

# A float64 mean is off by a few 1e-16 of itself, and so are "deviations" from it: less is constant.
_CONSTANT = 1e-14


class Moments(NamedTuple):
    """Number, means, and sums of squared and crossed deviations from the means."""

    size: int = 0
    golden: float = 0.0
    candidate: float = 0.0
    gg: float = 0.0
    cc: float = 0.0
    gc: float = 0.0


@dataclass(frozen=True)
class Pearson:
    """Correlation of deviations from the means, merged chunk by chunk without cancellation.

    A constant tensor has no correlation: 1 where both are constant (neither varies where the other
    does not), 0 where one is. One element is constant. NaN of nothing.
    """

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> Moments:
        """Return the moments of nothing."""
        return Moments()

    def update(self, state: Moments, chunk: Chunk) -> Moments:
        """Merge the chunk's moments into the state."""
        return _merge(state, _moments(chunk)) if chunk.count else state

    def compute(self, state: Moments) -> float:
        """Return the correlation."""
        if not state.size:
            return float("nan")
        golden = _varies(state.gg, state.golden, state.size)
        candidate = _varies(state.cc, state.candidate, state.size)
        if not (golden and candidate):
            return 1.0 if golden == candidate else 0.0
        return max(-1.0, min(1.0, state.gc / (math.sqrt(state.gg) * math.sqrt(state.cc))))


def _moments(chunk: Chunk) -> Moments:
    golden, candidate = float(chunk.golden64.mean()), float(chunk.candidate64.mean())
    g, c = chunk.golden64 - golden, chunk.candidate64 - candidate
    gg, cc, gc = (float(torch.dot(*pair)) for pair in ((g, g), (c, c), (g, c)))
    return Moments(chunk.count, golden, candidate, gg, cc, gc)


def _merge(old: Moments, new: Moments) -> Moments:
    """Chan's update: the chunks' own deviations, plus those between their means."""
    count = old.size + new.size
    share = new.size / count
    g, c = new.golden - old.golden, new.candidate - old.candidate
    between = old.size * share
    return Moments(
        count,
        old.golden + g * share,
        old.candidate + c * share,
        old.gg + new.gg + g * g * between,
        old.cc + new.cc + c * c * between,
        old.gc + new.gc + g * c * between,
    )


def _varies(squares: float, mean: float, count: int) -> bool:
    return squares > count * (_CONSTANT * mean) ** 2


METRIC = Pearson()
