"""What ports show of what they saw: a pass's own tokens, [batch, token, ...], in one order."""

from __future__ import annotations

import pytest
import torch

from layerparity.anatomy.family import CHOICES, HEADS, HIDDEN, ROUTED, WEIGHED, Tap
from layerparity.ports.base import Call
from layerparity.ports.observed.canonical import (
    chosen_tokens,
    laid_out,
    newest,
    own_choices,
    shown,
    sort_routing,
    visible,
)

KEY = Tap("self_attn:k_rotated", "self_attn", HEADS, attention="key")
ROUTER = (Tap(ROUTED, "mlp.gate", CHOICES), Tap(WEIGHED, "mlp.gate"))


def call(seen: int, tokens: int, padding: int = 0) -> Call:
    """Return a pass over the last ``tokens`` of ``seen`` ones, some of two rows' first padding."""
    mask = torch.ones(2, seen, dtype=torch.int64)
    mask[1, :padding] = 0
    return Call(mask, torch.zeros(2, tokens, dtype=torch.int64))


@pytest.mark.parametrize(
    ("seen", "tokens", "held", "first", "end"),
    [
        # A prefill that keeps nothing else, one into a cache of a fixed size, a step after it.
        (5, 5, 5, 0, 5),
        (5, 5, 12, 0, 5),
        (6, 1, 12, 5, 6),
        # A cache that grows, and a window that has moved on.
        (6, 1, 6, 5, 6),
        (9, 1, 4, 3, 4),
        (9, 6, 4, 0, 4),
    ],
)
def test_a_pass_s_own_keys_are_the_newest(
    seen: int, tokens: int, held: int, first: int, end: int
) -> None:
    assert newest(call(seen, tokens), held) == slice(first, end)


def test_of_a_cache_with_empty_places_the_keys_of_the_step_are_shown() -> None:
    # [batch, head, place, channel]; the places after the sixth are empty, as zeros are.
    keys = torch.zeros(2, 3, 12, 4)
    keys[:, :, :6] = torch.arange(1.0, 7.0).view(1, 1, 6, 1)
    assert torch.equal(laid_out(KEY, keys, call(6, 1)), torch.full((2, 1, 3, 4), 6.0))
    assert laid_out(KEY, keys, call(6, 6))[0, :, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_axes_are_batch_and_token_first() -> None:
    whole, tokens = torch.randn(2, 5, 8), call(5, 5)
    tap = Tap("mlp:out", "mlp", HIDDEN)
    assert torch.equal(laid_out(tap, whole, tokens), whole)
    assert torch.equal(laid_out(tap, whole.flatten(0, 1), tokens), whole)
    heads = torch.randn(2, 3, 5, 4)
    query = Tap("self_attn:q_rotated", "self_attn", HEADS, attention="query")
    assert torch.equal(laid_out(query, heads, tokens), heads.transpose(1, 2))


def test_each_token_sees_itself_and_those_before_it_but_no_padding() -> None:
    rows = visible(call(4, 4, padding=2)).int().tolist()
    assert rows[0] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert rows[1] == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert visible(call(4, 1)).int().tolist() == [[[1, 1, 1, 1]]] * 2
    assert visible(call(4, 2)).int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]]] * 2


def test_tokens_that_cannot_be_looked_at_are_not_chosen() -> None:
    value = torch.tensor([[[2, 0, 1], [0, 3, 1]]]).expand(2, -1, -1)
    chosen = chosen_tokens(value, call(3, 2, padding=1))
    assert chosen[0].tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert chosen[1].tolist() == [[-1, -1, 1], [-1, -1, 1]]
    beyond = torch.full((2, 1, 3), 7)
    assert chosen_tokens(beyond, call(3, 1)).tolist() == [[[-1, -1, -1]]] * 2


def test_experts_are_sorted_and_their_weights_go_with_them() -> None:
    tensors = {
        ROUTED: torch.tensor([[[5, 1, 3], [0, 2, 9]]]),
        WEIGHED: torch.tensor([[[0.1, 0.7, 0.2], [0.6, 0.3, 0.1]]]),
    }
    unseen: dict[str, str] = {}
    sort_routing(tensors, unseen)
    assert tensors[ROUTED].tolist() == [[[1, 3, 5], [0, 2, 9]]]
    expected = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]])
    assert torch.equal(tensors[WEIGHED], expected) and unseen == {}
    alone = {WEIGHED: expected}
    sort_routing(alone, unseen)
    assert alone == {} and "capture mlp.gate:choices too" in unseen[WEIGHED]


def test_choices_that_were_repeated_give_way_to_the_routers_own() -> None:
    seen = {
        ROUTED: torch.tensor([[5, 1], [0, 2]]),
        WEIGHED: torch.tensor([[0.4, 0.6], [0.5, 0.5]]),
        own_choices(ROUTED): torch.tensor([[7, 1], [4, 2]]),
    }
    one = Call(torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    tensors, specs, unseen = shown((*ROUTER, Tap("mlp:out", "mlp")), seen, one)
    assert tensors[ROUTED].tolist() == [[[1, 7], [2, 4]]]
    assert torch.equal(tensors[WEIGHED], torch.tensor([[[0.6, 0.4], [0.5, 0.5]]]))
    assert specs[ROUTED] == CHOICES and unseen == {"mlp:out": "mlp gives no such tensor here"}
