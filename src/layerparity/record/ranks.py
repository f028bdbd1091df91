"""Ranks: which of them held what of a run's tensors, and where their replicas disagreed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sharding:
    """How ranks share one tensor: positions ``start`` to ``stop`` of ``axis`` are of ``rank``.

    A position may be of several ranks, which hold replicas of it.
    """

    axis: str
    shares: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, axis: str, indices: Iterable[Iterable[int]]) -> Sharding:
        """Return the sharding of the positions that each rank holds, padding (-1) left out."""
        shares = []
        for rank, index in enumerate(indices):
            runs: list[list[int]] = []
            for place in sorted(set(index) - {-1}):
                if runs and runs[-1][1] == place:
                    runs[-1][1] = place + 1
                else:
                    runs.append([place, place + 1])
            shares += [(start, stop, rank) for start, stop in runs]
        return cls(axis, tuple(shares))

    def widened(self, axis: str, size: int) -> Sharding:
        """Return the shares of a longer axis, on which each position here is several in a row."""
        times = size // max((stop for _, stop, _ in self.shares), default=size)
        shares = ((start * times, stop * times, rank) for start, stop, rank in self.shares)
        return Sharding(axis, tuple(shares))

    def places(self) -> dict[int, list[int]]:
        """Return the positions that each rank holds; a rank of padding alone has no entry."""
        found: dict[int, list[int]] = {}
        for start, stop, rank in self.shares:
            found.setdefault(rank, []).extend(range(start, stop))
        return found


@dataclass(frozen=True)
class Disagreement:
    """Replicas of a site that differ: by how much of its norm, and which ranks' are odd."""

    relative: float
    ranks: tuple[int, ...]


@dataclass
class RankRecord:
    """What is known of the ranks of a run, by site (a decode step's by that of the prefill).

    ``degree`` is their number. Sites that all ranks hold whole have no sharding. ``weights`` are
    the ranks whose part of a stored tensor is not the checkpoint's, by its name.
    """

    degree: int = 1
    shardings: dict[str, Sharding] = field(default_factory=dict)
    disagreements: dict[str, Disagreement] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
