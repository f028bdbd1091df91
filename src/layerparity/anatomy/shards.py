"""Say which heads, experts and rows of a vocabulary each rank of a tp_degree holds.

The rules are those of AWS's neuronx-distributed-inference, ``modules/attention/gqa.py`` (which
heads are padded and which repeated) and ``modules/moe``; numbers go in and numbers come out, so
that a plan, a port, ranks that are emulated and a reader of shards share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from layerparity.ground.errors import UserError

# Past it no degree is looked for: the largest Trainium UltraServer has 1152 physical cores.
MOST_RANKS = 1152


class Strategy(StrEnum):
    """How KV heads become enough for every rank."""

    replicate = "replicate to tp_degree"
    convert = "convert to MHA"


def padded(size: int, degree: int) -> int:
    """Return the smallest multiple of ``degree`` that is not below ``size``."""
    return -(-size // degree) * degree


def spans(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return where each rank's part of ``size`` begins and ends; the last ones may be empty.

    A size that does not divide is filled up with zeros at its end, which no sum shows.
    """
    each = padded(size, ranks) // ranks
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]


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


@dataclass(frozen=True)
class Heads:
    """``query`` and ``kv`` heads of an architecture, laid over ``degree`` ranks.

    Raises UserError where query heads are no multiple of KV heads, which no strategy serves.
    """

    query: int
    kv: int
    degree: int

    def __post_init__(self) -> None:
        if self.query % self.kv:
            raise UserError(
                f"{self.query} query heads are no multiple of {self.kv} KV heads",
                "correct num_attention_heads or num_key_value_heads in config.json.",
            )

    @property
    def strategy(self) -> Strategy:
        """KV heads are repeated within their group where ``kv`` divides ``degree``."""
        return Strategy.convert if self.degree % self.kv else Strategy.replicate

    @property
    def padded_query(self) -> int:
        """Query heads with the heads of zeros that make them a multiple of ``degree``."""
        return padded(self.query, self.degree)

    @property
    def held_kv(self) -> int:
        """KV heads of all ranks together, repetitions and heads of zeros among them."""
        if self.query == self.kv:
            return self.padded_query
        if self.kv % self.degree == 0:
            return self.kv
        return self.degree if self.strategy is Strategy.replicate else self.padded_query

    @property
    def converts(self) -> bool:
        """Whether each query head of a group gets a KV head of its own.

        The library as it was read pads K and V by the number of KV heads of before, and refuses
        the shape that comes of it.
        """
        grouped = self.kv not in (self.query, self.held_kv)
        return grouped and self.strategy is Strategy.convert

    def queries_of(self, rank: int) -> tuple[int | None, ...]:
        """Return the canonical query head in each place of a rank; None is a head of zeros.

        Replicated, the zeros follow the heads of each KV group; converted, they follow all heads.
        """
        if self.strategy is Strategy.convert:
            places = self._places(rank, self.padded_query)
            return tuple(each if each < self.query else None for each in places)
        group, wide = self.query // self.kv, self.padded_query // self.kv
        places = self._places(rank, self.padded_query)
        return tuple(p // wide * group + p % wide if p % wide < group else None for p in places)

    def kv_of(self, rank: int) -> tuple[int | None, ...]:
        """Return the canonical KV head in each place of a rank; None is a head of zeros."""
        places = self._places(rank, self.held_kv)
        if self.strategy is Strategy.replicate or self.held_kv == self.kv:
            return tuple(place * self.kv // self.held_kv for place in places)
        group = self.query // self.kv
        return tuple(each // group if each < self.query else None for each in places)

    def shares(self) -> list[HeadShare]:
        """Return what each rank holds, heads of zeros left out."""
        group, shares = self.query // self.kv, []
        for rank in range(self.degree):
            held = [each for each in self.queries_of(rank) if each is not None]
            first, end = (held[0], held[-1] + 1) if held else (self.query, self.query)
            reads = tuple(each // group for each in range(first, end))
            shares.append(HeadShare(first, end, reads))
        return shares

    def _places(self, rank: int, heads: int) -> range:
        each = heads // self.degree
        return range(rank * each, (rank + 1) * each)


@dataclass(frozen=True)
class ExpertGroups:
    """``experts`` by number on ``groups`` groups of ``degree`` ranks; within a group by width.

    moe_ep_degree is the number of groups, moe_tp_degree that of the ranks in one. Ranks in a row
    are of one group, as in NxD's ``initialize_model_parallel``. ``groups`` divides both others.
    """

    experts: int
    degree: int
    groups: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that hold parts of the same experts."""
        return self.degree // self.groups

    def held_by(self, rank: int) -> range:
        """Return the experts that a rank holds a part of, or all of each."""
        first, end = spans(self.experts, self.groups)[rank // self.ranks]
        return range(first, end)


@dataclass(frozen=True)
class Misfit:
    """A size that NxDI neither pads nor repeats, and the part of tp_degree that must divide it."""

    what: str
    size: int
    by: str
    part: int


@dataclass(frozen=True)
class Widths:
    """What must divide evenly: widths of MLPs, and the number of experts; 0 where there is none."""

    dense: int
    expert: int
    experts: int

    def misfits(self, degree: int, ep: int) -> list[Misfit]:
        """Return what ``degree`` ranks, ``ep`` groups of them by expert, do not divide.

        ``degree`` must be a multiple of ``ep``: the experts are split ``ep`` ways by number and
        ``degree / ep`` ways by width.
        """
        own = "tp_degree" if ep == 1 else "moe_tp_degree"
        rows = (
            Misfit("intermediate size", self.dense, "tp_degree", degree),
            Misfit("intermediate size of an expert", self.expert, own, degree // ep),
            Misfit("experts", self.experts, "moe_ep_degree", ep),
        )
        return [row for row in rows if row.size % row.part]

    def degrees(self, ep: int, most: int = MOST_RANKS) -> Iterator[int]:
        """Yield every tp_degree that NxDI takes, ascending."""
        for degree in range(ep, most + 1, ep):
            if not self.misfits(degree, ep):
                yield degree
