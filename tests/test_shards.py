"""Shards: which head, repeated or of zeros, and which experts each rank holds in NxDI."""

from __future__ import annotations

import pytest
import torch

from layerparity.anatomy.shards import ExpertGroups, Heads, Misfit, Strategy, Widths, padded
from layerparity.ground.errors import UserError

# How the library itself lays them out, worked out by its own functions.
KNOWN = [
    # heads, KV heads, degree, padded query heads, held KV heads, strategy
    (48, 8, 64, 64, 64, Strategy.replicate),
    (48, 8, 8, 48, 8, Strategy.replicate),
    (48, 8, 32, 64, 32, Strategy.replicate),
    (48, 8, 4, 48, 8, Strategy.convert),
    (48, 8, 12, 48, 48, Strategy.convert),
    (56, 8, 12, 60, 60, Strategy.convert),
    (40, 40, 32, 64, 64, Strategy.convert),
    (8, 8, 16, 16, 16, Strategy.replicate),
    (4, 1, 3, 6, 3, Strategy.replicate),
]


@pytest.mark.parametrize(("query", "kv", "degree", "wide", "held", "strategy"), KNOWN)
def test_heads_are_padded_and_repeated(
    query: int, kv: int, degree: int, wide: int, held: int, strategy: Strategy
) -> None:
    heads = Heads(query, kv, degree)
    assert (heads.padded_query, heads.held_kv, heads.strategy) == (wide, held, strategy)
    queries = [each for rank in range(degree) for each in heads.queries_of(rank)]
    assert len(queries) == wide
    assert [each for each in queries if each is not None] == list(range(query))
    for rank in range(degree):
        mine, keys = heads.queries_of(rank), heads.kv_of(rank)
        share = len(mine) // len(keys)
        for place, head in enumerate(mine):
            # A query head without its own KV head beside it would attend to another's.
            assert head is None or keys[place // share] == head // (query // kv)


def test_zeros_follow_each_group_where_kv_heads_are_repeated() -> None:
    heads = Heads(48, 8, 64)
    assert [heads.queries_of(rank) for rank in range(9)] == [
        *((head,) for head in range(6)),
        (None,),
        (None,),
        (6,),
    ]
    assert [heads.kv_of(rank) for rank in (0, 7, 8, 63)] == [(0,), (0,), (1,), (7,)]
    two = Heads(48, 8, 32)
    assert [two.queries_of(rank) for rank in range(5)] == [(0, 1), (2, 3), (4, 5), (None, None), (6, 7)]  # fmt: skip # noqa: E501


def test_zeros_follow_all_heads_where_they_are_converted() -> None:
    heads = Heads(56, 8, 12)
    assert heads.queries_of(0) == (0, 1, 2, 3, 4)
    assert heads.kv_of(1) == (0, 0, 1, 1, 1)
    assert heads.queries_of(11) == (55, None, None, None, None)
    assert heads.kv_of(11) == (7, None, None, None, None)


def test_the_layout_is_that_of_interleaved_padding() -> None:
    """The same layout by tensors: repeated rows for KV heads, rows of zeros after each group."""
    for query, kv, degree in ((6, 2, 8), (12, 4, 16), (10, 5, 15), (48, 8, 64)):
        heads, rows = Heads(query, kv, degree), torch.arange(1, query + 1).view(kv, -1)
        wide = torch.nn.functional.pad(rows, (0, heads.padded_query // kv - query // kv)).flatten()
        found = [each for rank in range(degree) for each in heads.queries_of(rank)]
        assert [0 if each is None else each + 1 for each in found] == wide.tolist()
        repeated = torch.arange(kv).repeat_interleave(heads.held_kv // kv)
        assert [e for rank in range(degree) for e in heads.kv_of(rank)] == repeated.tolist()


def test_heads_that_no_group_holds_are_refused() -> None:
    with pytest.raises(UserError, match="10 query heads are no multiple of 4 KV heads"):
        Heads(10, 4, 8)


def test_what_does_not_divide_is_named() -> None:
    widths = Widths(dense=0, expert=1536, experts=256)
    assert widths.misfits(64, 1) == widths.misfits(64, 4) == []
    assert widths.misfits(5, 1) == [Misfit("intermediate size of an expert", 1536, "tp_degree", 5)]  # fmt: skip # noqa: E501
    # Split by number, the experts' width need not divide tp_degree itself.
    assert widths.misfits(1024, 1)
    assert not widths.misfits(1024, 2)
    assert [row.by for row in widths.misfits(72, 9)] == ["moe_ep_degree"]
    assert list(widths.degrees(1, 8)) == [1, 2, 3, 4, 6, 8]
    assert list(widths.degrees(4, 24)) == [4, 8, 12, 16, 24]
    assert [row.what for row in Widths(96, 0, 0).misfits(5, 1)] == ["intermediate size"]
    assert (padded(48, 64), padded(200_064, 64), padded(10, 4)) == (64, 200_064, 12)


def test_ranks_in_a_row_share_the_same_experts_by_width() -> None:
    """NxD's groups of tp_degree=8, moe_ep_degree=4: [0, 1], [2, 3], ..., four experts each."""
    groups = ExpertGroups(16, 8, 4)
    assert groups.ranks == 2
    assert [groups.held_by(rank).start for rank in range(8)] == [0, 0, 4, 4, 8, 8, 12, 12]
    assert groups.held_by(7) == range(12, 16)
    assert ExpertGroups(16, 8).held_by(5) == range(16)
