"""What ranks hold of a tensor is put together, and what they disagree on is told."""

from __future__ import annotations

import math

import pytest
import torch

from layerparity.numbers.rank_shares import SUM, WHOLE, RankShare, Spread, distance, merge
from layerparity.record.ranks import Sharding


def split(*index: int, dim: int = 1) -> RankShare:
    return RankShare(Spread.SPLIT, dim, index)


WHOLE_TENSOR = torch.arange(12.0).view(2, 6)


def columns(*index: int) -> torch.Tensor:
    """Return columns of the whole; -1 is padding, which must not get into it."""
    padded = torch.cat([WHOLE_TENSOR, torch.full((2, 1), 77.0)], 1)
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
    assert torch.equal(merged.tensor, WHOLE_TENSOR)
    assert (merged.relative, merged.ranks) == (0.0, ())


def test_terms_of_a_sum_are_added_in_float32() -> None:
    parts = [torch.tensor([256.0, 1.0]).bfloat16(), *[torch.ones(2).bfloat16()] * 2]
    # In bfloat16, 256 + 1 + 1 is 256.
    assert merge(parts, [SUM] * 3).tensor.tolist() == [258.0, 3.0]


def test_the_rank_that_most_disagree_with_is_the_odd_one() -> None:
    parts = [WHOLE_TENSOR, WHOLE_TENSOR, WHOLE_TENSOR * 1.5, WHOLE_TENSOR]
    merged = merge(parts, [WHOLE] * 4)
    assert (merged.relative, merged.ranks) == (0.5, (2,))
    first = merge([WHOLE_TENSOR * 2, *[WHOLE_TENSOR] * 3], [WHOLE] * 4)
    assert first.ranks == (0,)


def test_of_ranks_that_all_differ_none_is_believed() -> None:
    """Terms of a sum that nobody made: that many differ from the first makes no side of them."""
    parts = [WHOLE_TENSOR * each for each in (1, 2, 3, 4)]
    assert merge(parts, [WHOLE] * 4).ranks == (0, 1, 2, 3)
    two = [WHOLE_TENSOR, WHOLE_TENSOR * 2, WHOLE_TENSOR * 3, WHOLE_TENSOR * 2]
    assert merge(two, [WHOLE] * 4).ranks == (0, 2)


def test_of_two_that_disagree_neither_is_believed() -> None:
    assert merge([WHOLE_TENSOR, WHOLE_TENSOR + 1], [WHOLE] * 2).ranks == (0, 1)


def test_replicas_of_a_share_disagree_only_with_each_other() -> None:
    """Key heads 0 and 1, each on two ranks: rank 3's copy of the second is another."""
    indices = [(0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5)]
    parts = [columns(*each) for each in indices]
    parts[3] = parts[3] + 1
    merged = merge(parts, [split(*each) for each in indices])
    assert merged.ranks == (2, 3)
    assert torch.equal(merged.tensor, WHOLE_TENSOR)


@pytest.mark.parametrize(
    ("parts", "shares", "why"),
    [
        ([columns(0, 1), columns(3, 4)], [split(0, 1), split(3, 4)], "no rank holds position 2"),
        ([columns(0), columns(1)], [split(0), WHOLE], "not of one kind"),
        ([columns(0), columns(0, 1)], [WHOLE, WHOLE], "replicas have the shapes"),
    ],
)
def test_what_is_no_whole_is_refused(
    parts: list[torch.Tensor], shares: list[RankShare], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        merge(parts, shares)


def test_a_distance_knows_what_is_not_finite() -> None:
    gap = torch.tensor([1.0, math.nan])
    assert distance(gap, gap) == 0
    assert distance(gap, torch.ones(2)) == math.inf
    assert distance(torch.ones(2), torch.zeros(2)) == math.inf
    assert distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == pytest.approx(34**-0.5)


def test_a_sharding_says_whose_a_position_is() -> None:
    sharding = Sharding.of("head", [(0, 1, -1), (1, 0, -1), (4, 2, 3), (-1,)])
    assert sharding.shares == ((0, 2, 0), (0, 2, 1), (2, 5, 2))
    assert sharding.ranks_at(1) == (0, 1)
    assert sharding.ranks_at(4) == (2,)
    assert sharding.ranks_at(5) == ()
