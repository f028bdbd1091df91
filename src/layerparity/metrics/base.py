"""What every metric offers, and how pairs of tensors stream through all of them in one pass.

A metric's file holds ``METRIC``: a frozen object that makes a state, updates it with chunks and
computes a float from it. Most are formulas of `Numbers`, which `Chunk` works out once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from layerparity import registry
from layerparity.metrics._chunk import Chunk
from layerparity.site import Kind

FLOATING = (Kind.REAL, Kind.EXACT)


class Metric(Protocol):
    """A number over all elements of two tensors, computed from chunks of them.

    Error metrics look at pairs that are finite on both sides; the others are counted by
    ``nonfinite_disagreement``. Without any pair an error metric is NaN: undefined, never a pass.
    """

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of site the metric means something at."""

    def start(self) -> Any:
        """Return the state before the first chunk."""

    def update(self, state: Any, chunk: Chunk) -> Any:
        """Return the state after one more chunk; the old state is not used again."""

    def compute(self, state: Any) -> float:
        """Return the metric."""


@dataclass(frozen=True)
class Additive:
    """A metric that is a formula of sums over the chunks; ``terms`` name `Numbers`' fields."""

    terms: tuple[str, ...]
    formula: Callable[..., float]
    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> tuple[float, ...]:
        """Return zeros."""
        return (0.0,) * len(self.terms)

    def update(self, state: tuple[float, ...], chunk: Chunk) -> tuple[float, ...]:
        """Add the chunk's terms."""
        return tuple(
            old + getattr(chunk.numbers, term) for old, term in zip(state, self.terms, strict=True)
        )

    def compute(self, state: tuple[float, ...]) -> float:
        """Return the formula of the sums."""
        return self.formula(*state)


class Stream:
    """The metrics that apply to a kind of site, fed chunk by chunk."""

    def __init__(self, kind: Kind) -> None:
        self.elements = 0
        self._metrics = metrics_for(kind)
        self._states = {name: metric.start() for name, metric in self._metrics.items()}

    def feed(self, chunk: Chunk) -> None:
        """Update every metric with one chunk."""
        self.elements += chunk.size
        for name, metric in self._metrics.items():
            self._states[name] = metric.update(self._states[name], chunk)

    def results(self) -> dict[str, float]:
        """Return every metric by name."""
        return {name: float(m.compute(self._states[name])) for name, m in self._metrics.items()}


@cache
def metrics_for(kind: Kind) -> Mapping[str, Metric]:
    """Return the metrics that mean something at a kind of site, by file name, sorted."""
    loaded = {name: registry.load("metrics", name).METRIC for name in registry.names("metrics")}
    return {name: metric for name, metric in loaded.items() if kind in metric.kinds}
