"""Say what each tensor-parallel rank holds: its query heads, and its part of a width."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class HeadShare:
    """The query heads that one rank holds, as ``first`` and ``end``, and what each of them reads.

    ``reads`` is the key and value head of each. A rank whose heads are all padding holds none.
    """

    first: int
    end: int
    reads: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The key and value heads that the rank holds, each once."""
        return tuple(head for head, _ in groupby(self.reads))

    @property
    def even(self) -> bool:
        """Whether as many query heads read each of the key and value heads."""
        return len({len(list(run)) for _, run in groupby(self.reads)}) <= 1


def spans(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return where each rank's part of ``size`` begins and ends; the last ones may be empty.

    A size that does not divide is filled up with zeros at its end, which no sum shows.
    """
    each = -(-size // ranks)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]


def head_shares(heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """Return what each rank holds of ``heads`` query heads that share ``kv_heads`` KV heads.

    As neuronx-distributed-inference lays them out. Where the KV heads divide the ranks, each is
    held by as many ranks (rank r by r // (ranks / kv_heads)), and the query heads that read it are
    filled up with heads of zeros to theirs. Otherwise query heads are filled up at the end, and
    each rank holds the KV heads that its own read.
    """
    each, group = -(-heads // ranks), heads // kv_heads
    if ranks % kv_heads or kv_heads % ranks == 0:
        bounds = [(min(r * each, heads), min((r + 1) * each, heads)) for r in range(ranks)]
    else:
        copies = ranks // kv_heads
        bounds = [
            (kv * group + min(part * each, group), kv * group + min((part + 1) * each, group))
            for kv in range(kv_heads)
            for part in range(copies)
        ]
    return [
        HeadShare(first, end, tuple(head // group for head in range(first, end)))
        for first, end in bounds
    ]
