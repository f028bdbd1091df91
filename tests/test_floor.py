"""Floors: what clean ways show at a site, and how far the golden itself is off among them."""

from __future__ import annotations

import pytest
import torch

from layerparity.numbers.floor import GOLDEN, Floor, group_floor, measure_floor
from layerparity.numbers.token_sums import HEAD, WHOLE, TokenLayout


def floor(**errors: list[float]) -> Floor:
    """Return the floor of ways by their squared errors of each element."""
    elements = torch.tensor(list(errors.values()), dtype=torch.float64)
    return Floor(tuple(errors), elements.sum(1, keepdim=True), elements)


@pytest.mark.parametrize(
    ("errors", "share"),
    [
        # A golden that is off by more than the clean ways makes the floor as wide as that.
        ({GOLDEN: [64.0, 36.0], "double": [1.0, 0.0], "blocked": [2.0, 2.0]}, 5.0),
        ({"double": [3.0, 1.0], GOLDEN: [1.0, 0.0]}, 0.5),
        ({GOLDEN: [0.0, 0.0], "double": [1.0, 1.0]}, 0.0),
        # Beside nothing, or absent, it is off by no share.
        ({GOLDEN: [9.0, 0.0]}, 0.0),
        ({"double": [9.0, 0.0], "blocked": [1.0, 0.0]}, 0.0),
    ],
)
def test_the_goldens_own_error_is_held_against_the_largest_of_the_others(
    errors: dict[str, list[float]], share: float
) -> None:
    assert floor(**errors).golden_share() == pytest.approx(share)


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
