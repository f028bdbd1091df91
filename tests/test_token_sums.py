"""Token sums: how one token of a site is laid out in heads, and what is summed over each."""

from __future__ import annotations

import pytest
import torch

from layerparity.numbers.token_sums import CHANNEL, HEAD, WHOLE, TokenLayout, heads_of, token_layout

AXES = ("batch", "token", "head", "channel")
ROTATED = [("q_rotated", (1, 5, 8, 16), AXES), ("k_rotated", (1, 5, 2, 16), AXES)]
FLAT = ("batch", "token", "channel")


def test_values_have_as_many_heads_as_keys_and_not_as_queries() -> None:
    assert heads_of(ROTATED) == {"q": 8, "k": 2, "v": 2}
    assert heads_of(ROTATED[:1]) == {"q": 8}
    assert heads_of([("out", (1, 5, 128), FLAT)]) == {}


@pytest.mark.parametrize(
    ("local", "width", "heads"),
    [
        ("self_attn.q_proj:out", 128, 8),
        ("self_attn.k_proj:out", 32, 2),
        ("self_attn.v_proj:out", 32, 2),
        ("self_attn:out", 128, 0),
        ("mlp:out", 128, 0),
        # No whole number of channels to a head: no heads.
        ("self_attn.v_proj:out", 33, 0),
    ],
)
def test_a_projection_is_laid_out_in_its_own_heads(local: str, width: int, heads: int) -> None:
    layout = token_layout((1, 5, width), FLAT, local, heads_of(ROTATED))
    assert layout == TokenLayout(width, heads)


def test_a_site_with_an_axis_of_heads_needs_no_others_word() -> None:
    assert token_layout((2, 5, 8, 16), AXES, "self_attn:context", {}) == TokenLayout(128, 8)


def test_groups_are_neighbouring_elements() -> None:
    layout, values = TokenLayout(6, 3), torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    assert layout.groupings == (WHOLE, HEAD, CHANNEL)
    assert layout.sums(values, HEAD).tolist() == [[3, 7, 11]]
    assert layout.sums(values, WHOLE).tolist() == [[21]]
    assert layout.sums(values, CHANNEL) is values
    assert TokenLayout(6, 1).groupings == (WHOLE, CHANNEL)
