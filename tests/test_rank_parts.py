"""What ranks hold of one tensor is put together, and how it is split is found out."""

from __future__ import annotations

import pytest
import torch

from layerparity.numbers.rank_parts import PartKind, Split, apart, found_kind, merge

WHOLE = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
TERMS = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(1, 4)]
PARTIAL = [*TERMS, WHOLE - sum(TERMS)]


@pytest.mark.parametrize(
    ("parts", "split"),
    [
        ([WHOLE] * 4, Split(PartKind.REPLICATED)),
        ([WHOLE], Split(PartKind.REPLICATED)),
        (WHOLE.split(2, -1), Split(PartKind.SHARDED, -1)),
        (WHOLE.split(3, 1), Split(PartKind.SHARDED, -2)),
        # One rank has more: the last one holds what is left.
        (WHOLE.split(3, -1), Split(PartKind.SHARDED, -1)),
        ([each for each in WHOLE.split(4, -1) for _ in range(2)], Split(PartKind.SHARDED, -1, 2)),
        (PARTIAL, Split(PartKind.PARTIAL)),
    ],
)
def test_how_a_tensor_is_split_is_found_and_undone(parts: list[torch.Tensor], split: Split) -> None:
    assert found_kind(parts, WHOLE + 1e-3) == split
    whole = merge(parts, split.kind, split.axis, split.copies)
    torch.testing.assert_close(whole, WHOLE)


def test_replicas_that_disagree_are_replicas_and_named() -> None:
    parts = [WHOLE, WHOLE, WHOLE * 1.01, WHOLE]
    assert found_kind(parts, WHOLE) == Split(PartKind.REPLICATED)
    assert apart(parts) == pytest.approx({2: 0.01}, rel=1e-4)
    assert apart([WHOLE, WHOLE, TERMS[0], TERMS[0]], copies=2) == {}
    assert [*apart([WHOLE, TERMS[1], TERMS[0], TERMS[0]], copies=2)] == [1]


def test_a_rank_that_is_missing_fits_nothing() -> None:
    assert found_kind(WHOLE.split(2, -1)[:3], WHOLE) is None
    assert found_kind([WHOLE[0], WHOLE[0]], WHOLE) is None


def test_terms_are_added_where_a_narrow_type_would_round() -> None:
    parts = [torch.tensor([256.0]), *[torch.tensor([1.0])] * 3]
    narrow = [each.bfloat16() for each in parts]
    assert merge(narrow, PartKind.PARTIAL).item() == torch.tensor(259.0).bfloat16().item()
