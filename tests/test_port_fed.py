"""Another run's values in place of a block's own: where they go on, and where they must not."""

from __future__ import annotations

import pytest
import torch

from layerparity.anatomy.family import CHOICES, HEADS, HIDDEN, Tap
from layerparity.ports.observed.fed import Fed, called_again

OUT = Tap("mlp:out", "mlp", HIDDEN)
KEY = Tap("self_attn:k_rotated", "self_attn", HEADS, attention="key")


def fed(tap: Tap, values: torch.Tensor, mask: list[list[int]], tokens: int) -> Fed:
    return Fed({tap.local: values}, torch.tensor(mask), tokens)


def test_what_was_recorded_goes_on_and_padding_stays_as_it_was_computed() -> None:
    computed, recorded = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    given = fed(OUT, recorded, [[1, 1, 1], [0, 1, 1]], 3).instead_of(OUT, computed)
    assert given[:, :, 0].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert computed.eq(0).all(), "what was computed is kept for what else reads it"


def test_a_steps_token_is_real_whatever_stood_before_it() -> None:
    # The second row begins with padding; its newest token is none.
    given = fed(OUT, torch.ones(2, 1, 4), [[1, 1, 1, 1], [0, 0, 1, 1]], 1)
    assert given.instead_of(OUT, torch.zeros(2, 1, 4))[:, :, 0].tolist() == [[1], [1]]


def test_tokens_that_are_flattened_are_found() -> None:
    computed, recorded = torch.zeros(6, 4), torch.arange(6.0).view(2, 3, 1).expand(2, 3, 4)
    given = fed(OUT, recorded, [[1, 1, 1]] * 2, 3).instead_of(OUT, computed)
    assert given.shape == (6, 4) and given[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_numbers_that_are_none_go_no_further() -> None:
    recorded = torch.tensor([[[1.0, torch.nan, torch.inf]]])
    given = fed(OUT, recorded, [[1]], 1).instead_of(OUT, torch.full((1, 1, 3), 5.0))
    assert given.tolist() == [[[1.0, 5.0, 5.0]]]


@pytest.mark.parametrize("held", [4, 9])
def test_keys_of_former_steps_are_fed_too(held: int) -> None:
    # [batch, head, place, channel], in a cache that grew, or of a fixed size.
    computed, recorded = torch.zeros(1, 2, held, 3), torch.arange(1.0, 5.0).view(1, 4, 1, 1)
    given = fed(KEY, recorded.expand(1, 4, 2, 3), [[1, 1, 1, 1]], 1).instead_of(KEY, computed)
    assert given[0, 0, :, 0].tolist() == [1, 2, 3, 4, *[0] * (held - 4)]


def test_what_has_no_place_changes_nothing() -> None:
    computed = torch.zeros(1, 2, 4)
    other = fed(OUT, torch.ones(1, 2, 5), [[1, 1]], 2)
    assert other.instead_of(OUT, computed) is computed
    assert other.instead_of(Tap("mlp:in", "mlp"), computed) is computed
    choices = Tap("mlp:out", "mlp", CHOICES)
    assert fed(OUT, torch.ones(1, 2, 4), [[1, 1]], 2).instead_of(choices, computed) is computed


class Doubled(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * (given + 1)


def test_a_value_inside_a_module_is_replaced_where_it_is_computed() -> None:
    given = torch.tensor([1.0, 2.0])
    instead = torch.tensor([10.0, 20.0])
    found = called_again(Doubled(), ((given,), {}), given + 1, instead)
    assert found.tolist() == [20.0, 40.0]
    assert called_again(Doubled(), ((given,), {}), given + 3, instead) is None
