"""What ranks hold of a tensor is put together, how it is split is found, and who disagrees told."""

from __future__ import annotations

import math

import pytest
import torch

from layerparity.numbers.rank_parts import (
    TERM,
    WHOLE,
    PartKind,
    RankShare,
    Split,
    apart,
    disagreeing,
    distance,
    found_slices,
    is_same,
    merge,
    sums_up,
)
from layerparity.record.ranks import Sharding


def split(*index: int, dim: int = 1) -> RankShare:
    return RankShare(PartKind.SHARDED, dim, index)


GRID = torch.arange(12.0).view(2, 6)


def columns(*index: int) -> torch.Tensor:
    """Return columns of the whole; -1 is padding, which must not get into it."""
    padded = torch.cat([GRID, torch.full((2, 1), 77.0)], 1)
    return padded[:, list(index)]


@pytest.mark.parametrize(
    "indices",
    [
        [(0, 1, 2), (3, 4, 5)],
        [(5, 0, 3), (4, 2, 1)],
        [(0, 1, -1, 2), (-1, 3, 4, 5)],
        [(0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5)],
        [(0, 1, 2, 3, 4, 5), (-1, -1, -1, -1, -1, -1)],
    ],
)
def test_shares_make_up_the_whole(indices: list[tuple[int, ...]]) -> None:
    """In any order, with padding, replicas, and a rank that has nothing but padding."""
    merged = merge([columns(*each) for each in indices], [split(*each) for each in indices])
    assert torch.equal(merged.tensor, GRID)
    assert (merged.relative, merged.ranks) == (0.0, ())


def test_terms_of_a_sum_are_added_wide() -> None:
    parts = [torch.tensor([256.0, 1.0]).bfloat16(), *[torch.ones(2).bfloat16()] * 2]
    # In bfloat16, 256 + 1 + 1 is 256.
    assert merge(parts, [TERM] * 3).tensor.tolist() == [258.0, 3.0]


def test_the_rank_that_most_disagree_with_is_the_odd_one() -> None:
    parts = [GRID, GRID, GRID * 1.5, GRID]
    merged = merge(parts, [WHOLE] * 4)
    assert (merged.relative, merged.ranks) == (0.5, (2,))
    first = merge([GRID * 2, *[GRID] * 3], [WHOLE] * 4)
    assert first.ranks == (0,)


def test_of_ranks_that_all_differ_none_is_believed() -> None:
    """Terms of a sum that nobody made: that many differ from the first makes no side of them."""
    parts = [GRID * each for each in (1, 2, 3, 4)]
    assert merge(parts, [WHOLE] * 4).ranks == (0, 1, 2, 3)
    two = [GRID, GRID * 2, GRID * 3, GRID * 2]
    assert merge(two, [WHOLE] * 4).ranks == (0, 2)


def test_of_two_that_disagree_neither_is_believed() -> None:
    assert merge([GRID, GRID + 1], [WHOLE] * 2).ranks == (0, 1)


def test_replicas_of_a_share_disagree_only_with_each_other() -> None:
    """Key heads 0 and 1, each on two ranks: rank 3's copy of the second is another."""
    indices = [(0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5)]
    parts = [columns(*each) for each in indices]
    parts[3] = parts[3] + 1
    merged = merge(parts, [split(*each) for each in indices])
    assert merged.ranks == (2, 3)
    assert torch.equal(merged.tensor, GRID)


@pytest.mark.parametrize(
    ("parts", "shares", "why"),
    [
        ([columns(0, 1), columns(3, 4)], [split(0, 1), split(3, 4)], "no rank holds position 2"),
        ([columns(0), columns(1)], [split(0), WHOLE], "not of one kind"),
        ([columns(0), columns(0, 1)], [WHOLE, WHOLE], "replicas have the shapes"),
        ([columns(0), columns(0, 1)], [TERM, TERM], "terms have the shapes"),
    ],
)
def test_what_is_no_whole_is_refused(
    parts: list[torch.Tensor], shares: list[RankShare], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        merge(parts, shares)


def test_a_distance_knows_what_has_none() -> None:
    gap = torch.tensor([1.0, math.nan])
    assert distance(gap, gap) == 0
    assert distance(gap, torch.ones(2)) == math.inf
    # Nor is NaN a 0, on either side.
    assert distance(gap, torch.tensor([1.0, 0.0])) == math.inf
    assert distance(torch.tensor([1.0, 0.0]), gap) == math.inf
    assert distance(torch.ones(2), torch.zeros(2)) == math.inf
    most = torch.tensor([torch.finfo(torch.float32).max])
    assert distance(torch.tensor([math.inf]), most) == math.inf
    assert not is_same(torch.tensor([math.nan]), torch.zeros(1))
    assert distance(torch.ones(2), torch.ones(3)) == math.inf
    assert distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == pytest.approx(34**-0.5)


def test_a_sharding_says_whose_a_position_is() -> None:
    sharding = Sharding.of("head", [(0, 1, -1), (1, 0, -1), (4, 2, 3), (-1,)])
    assert sharding.shares == ((0, 2, 0), (0, 2, 1), (2, 5, 2))
    assert sharding.places() == {0: [0, 1], 1: [0, 1], 2: [2, 3, 4]}


# ---------------------------------------------------------------- found out
TENSOR = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
TERMS = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(1, 4)]
PARTIAL = [*TERMS, TENSOR - sum(TERMS)]


@pytest.mark.parametrize(
    ("parts", "split"),
    [
        (TENSOR.split(2, -1), Split(PartKind.SHARDED, -1)),
        (TENSOR.split(3, 1), Split(PartKind.SHARDED, -2)),
        # One rank has less: the last one holds what is left.
        (TENSOR.split(3, -1), Split(PartKind.SHARDED, -1)),
        ([each for each in TENSOR.split(4, -1) for _ in range(2)], Split(PartKind.SHARDED, -1, 2)),
    ],
)
def test_how_slices_lie_is_found_and_undone(parts: list[torch.Tensor], split: Split) -> None:
    assert found_slices(parts, TENSOR.shape) == split
    merged = merge(parts, split.shares(parts))
    assert torch.equal(merged.tensor, TENSOR)
    assert merged.relative == 0


def test_terms_are_told_from_replicas_that_disagree() -> None:
    shares = Split(PartKind.PARTIAL).shares(PARTIAL)
    torch.testing.assert_close(merge(PARTIAL, shares).tensor, TENSOR)
    assert sums_up(PARTIAL, TENSOR + 1e-3)
    replicas = [TENSOR, TENSOR, TENSOR * 1.01, TENSOR]
    assert not sums_up(replicas, TENSOR)
    assert torch.equal(merge(replicas, Split(PartKind.REPLICATED).shares(replicas)).tensor, TENSOR)
    assert apart(replicas) == pytest.approx({2: 0.01}, rel=1e-4)
    assert apart([TENSOR, TENSOR, TERMS[0], TERMS[0]], Split(PartKind.SHARDED, copies=2)) == {}
    # Of two neither is believed, and of terms that nobody added up none is.
    assert [*apart([TENSOR, TERMS[1], TERMS[0], TERMS[0]], Split(PartKind.SHARDED, copies=2))] == [
        0,
        1,
    ]
    assert [*apart([TENSOR * 2, TENSOR, TENSOR, TENSOR])] == [0]
    assert [*apart([TENSOR * each for each in (1, 2, 3, 4)])] == [0, 1, 2, 3]


def test_ranks_that_round_otherwise_agree() -> None:
    """To the bit they need not: a replica is no term of a sum for that."""
    rounded = torch.nextafter(TENSOR, TENSOR + 1)
    replicas = [TENSOR, rounded, TENSOR, TENSOR]
    assert [*apart(replicas)] == [1] and disagreeing(replicas) == {}
    assert [*disagreeing([TENSOR, TENSOR * (1 + 1e-6), TENSOR, TENSOR])] == [1]
    first, second = TENSOR.chunk(2, -1)
    tiled = Split(PartKind.SHARDED, -1, 2, tiled=True)
    parts = [first, second, torch.nextafter(first, first + 1), second]
    assert disagreeing(parts, tiled) == {} != disagreeing(parts, Split(PartKind.SHARDED, -1, 2))
    assert disagreeing([torch.tensor([1]), torch.tensor([2])]).keys() == {0, 1}


def test_a_rank_that_is_missing_fits_nothing() -> None:
    assert found_slices(TENSOR.split(2, -1)[:3], TENSOR.shape) is None
    assert found_slices([TENSOR[0], TENSOR[0]], TENSOR.shape) is None


def test_terms_are_added_where_a_narrow_type_would_round() -> None:
    narrow = [torch.tensor([each]).bfloat16() for each in (256.0, 1.0, 1.0, 1.0)]
    assert merge(narrow, [TERM] * 4).tensor.item() == torch.tensor(259.0).bfloat16().item()


def test_slices_that_are_tiled_are_told_from_those_in_a_row() -> None:
    """Two slices on four ranks, in either order: only in its own do all copies agree."""
    first, second = TENSOR.chunk(2, -1)
    tiled = Split(PartKind.SHARDED, -1, 2, tiled=True)
    parts = [first, second, first, second]
    assert tiled.slices(4) == [0, 1, 0, 1]
    assert merge(parts, tiled.shares(parts)).tensor.equal(TENSOR)
    assert not apart(parts, tiled)
    assert set(apart(parts, Split(PartKind.SHARDED, -1, 2))) == {0, 1, 2, 3}
