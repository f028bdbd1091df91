"""Floors: what clean ways show at a site, and how far the golden itself is off among them."""

from __future__ import annotations

import pytest
import torch

from layerparity.numbers.floor import (
    OFF,
    group_floor,
    measure_floor,
    measure_floors,
)
from layerparity.numbers.token_sums import HEAD, WHOLE, TokenLayout


def test_a_golden_is_off_by_more_than_clean_ways_and_than_a_rounding() -> None:
    """Of several passes each by itself, and nothing is said of one in a shorter type."""
    draw, mask, layout = torch.Generator().manual_seed(0), torch.ones(64).bool(), TokenLayout(8, 0)
    reference = torch.randn(2, 64, 8, generator=draw).double()
    way = (reference + 1e-3 * torch.randn(2, 64, 8, generator=draw)).float()
    golden = torch.stack([way[0], reference[1].float() * 1.01])

    def shares(golden: torch.Tensor, way: torch.Tensor) -> tuple[float, ...]:
        return measure_floors({"a": way}, golden, reference, mask, layout).golden_shares

    own, off = shares(golden, way)
    assert own == pytest.approx(1, rel=0.05) and off == pytest.approx(10, rel=0.1)
    # Where a clean way happens to agree to the bit, rounding alone is no fault.
    exact = reference.float()
    assert max(shares(exact.nextafter(2 * exact), exact)) < OFF
    assert min(shares(exact * (1 + 1e-5), exact)) > OFF
    assert shares(golden.bfloat16(), way) == ()
    assert min(shares(torch.full_like(golden, float("nan")), way)) > OFF


def test_the_floor_of_a_group_is_that_of_its_noisiest_way() -> None:
    elements = torch.tensor([[1.0, 1.0, 9.0, 0.0], [2.0, 3.0, 0.0, 1.0]])
    layout, ones = TokenLayout(4, 2), torch.ones(4)
    assert group_floor(elements, ones, layout, HEAD).tolist() == [5, 9]
    assert group_floor(elements, ones, layout, WHOLE).tolist() == [11]
    # Each way's own sum, and no sum of the worst of each.
    assert group_floor(elements, torch.tensor([0.0, 1, 0, 1]), layout, WHOLE).tolist() == [4]


def test_padding_counts_for_no_element_and_each_token_has_its_own_sum() -> None:
    reference = torch.zeros(3, 2)
    way = torch.tensor([[1.0, 2.0], [3.0, 0.0], [7.0, 7.0]])
    mask = torch.tensor([True, True, False])
    found = measure_floor({"double": way}, reference, reference, mask, TokenLayout(2, 0))
    assert found.tokens.tolist() == [[5, 9, 98]]
    assert found.elements.tolist() == [[10, 4]]
    assert found.real is not None and found.real.tolist() == [[5, 9], [0, 0]]
