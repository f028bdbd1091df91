"""What every metric offers, and how pairs of tensors stream through all of them in one pass.

A metric is a frozen object that makes a state, updates it with chunks and computes a float from it.
Most are formulas of `PairSums`, which `Chunk` works out once for all. Each stands by its name in
``METRICS`` of a file in `numbers.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from layerparity.anatomy.site import Kind
from layerparity.ground import registry
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.pair_sums import PairSums, larger, plain_sums

FLOATING = (Kind.REAL, Kind.EXACT)
# With fewer elements torch is done before numba is imported, or even compiling for the first time.
_WORTH_COMPILING = 1 << 16


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
    """A metric that is a formula of sums over the chunks; ``terms`` name `PairSums`' fields."""

    terms: tuple[str, ...]
    formula: Callable[..., float]
    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> tuple[float, ...]:
        """Return zeros."""
        return (0.0,) * len(self.terms)

    def update(self, state: tuple[float, ...], chunk: Chunk) -> tuple[float, ...]:
        """Add the chunk's terms."""
        return tuple(
            old + getattr(chunk.sums, term) for old, term in zip(state, self.terms, strict=True)
        )

    def compute(self, state: tuple[float, ...]) -> float:
        """Return the formula of the sums."""
        return self.formula(*state)


@dataclass(frozen=True)
class Largest:
    """The largest value of a chunk's number ``term``, over all chunks; NaN where none has one."""

    term: str
    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self) -> float:
        """Return NaN: nothing was seen."""
        return float("nan")

    def update(self, state: float, chunk: Chunk) -> float:
        """Return the larger of what was seen."""
        return larger(state, getattr(chunk.sums, self.term))

    def compute(self, state: float) -> float:
        """Return the largest value."""
        return state


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
    """Return the metrics that mean something at a kind of site, by name, sorted."""
    return {name: metric for name, metric in every_metric().items() if kind in metric.kinds}


@cache
def every_metric() -> Mapping[str, Metric]:
    """Return the metrics of all files by name, sorted. Raises ValueError for a name given twice."""
    pairs: list[tuple[str, Metric]] = []
    for file in registry.names("numbers.metrics"):
        pairs += registry.load("numbers.metrics", file).METRICS.items()
    metrics = dict(sorted(pairs))
    # Of two with one name a dictionary keeps the last, without a word.
    if len(metrics) < len(pairs):
        raise ValueError(f"two metrics have one name: {sorted(name for name, _ in pairs)}")
    return metrics


class Chunk:
    """Two tensors of one shape, any dtypes; the first axis of two or more is rows.

    ``close`` says which of their elements are similar. ``sums`` are given where they were worked
    out together with those of others.
    """

    def __init__(
        self,
        golden: torch.Tensor,
        candidate: torch.Tensor,
        close: Closeness = CLOSE,
        *,
        sums: PairSums | None = None,
    ) -> None:
        if golden.shape != candidate.shape:
            raise ValueError(f"{list(golden.shape)} against {list(candidate.shape)}")
        self.golden = golden
        self.candidate = candidate
        self.close = close
        self.size = golden.numel()
        self._sums = sums

    @property
    def sums(self) -> PairSums:
        """Sums, counts and extremes over all elements, worked out once, when first asked."""
        return self._measured[0] if self._sums is None else self._sums

    @property
    def row_squares(self) -> np.ndarray:
        """Float64 [2, rows]: sums of golden^2 and of (candidate - golden)^2 in each row.

        Over the row's finite pairs; the latter is Inf in a row with any other.
        """
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[PairSums, np.ndarray]:
        rows = self.golden.shape[0] if self.golden.dim() > 1 else 1
        if not self.size:
            return PairSums(), np.zeros((2, rows))
        golden, candidate = self.golden.reshape(rows, -1), self.candidate.reshape(rows, -1)
        if self.size >= _WORTH_COMPILING and find_spec("numba") is not None:
            # Here and not above: importing numba takes longer than the sums of a small chunk.
            from layerparity.numbers import fused

            if fused.takes(golden, candidate):
                return fused.fused_sums(golden, candidate, self.close)
        return plain_sums(golden, candidate, self.close)
