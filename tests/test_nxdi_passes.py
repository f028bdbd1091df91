"""What NxDI is given of a pass: rows that begin with their first token, and buckets."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from layerparity.ports.base import Call
from layerparity.ports.nxdi.passes import pass_of

# Two rows of three and of two tokens, the second one padded.
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
PLACES = torch.tensor([[0, 1, 2], [1, 0, 1]])


def test_a_prefill_begins_with_its_tokens_and_fills_a_window() -> None:
    now = pass_of(Call(MASK, PLACES), window=5)
    ids = torch.tensor([[7, 8, 9], [0, 5, 6]])
    turned = now.turned(ids)
    assert turned.tolist() == [[7, 8, 9, 0, 0], [5, 6, 0, 0, 0]]
    # A windowed cache takes the largest position for the last token.
    assert now.positions.tolist() == [[0, 1, 2, 1, 1], [0, 1, 1, 1, 1]]
    assert now.mask(None).tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert torch.equal(now.back(turned), ids)
    states = torch.randn(2, 3, 4)
    assert now.turned(states).shape == (2, 5, 4)
    assert torch.equal(now.back(now.turned(states)), states)


def test_without_a_window_a_bucket_is_the_prompt() -> None:
    now = pass_of(Call(MASK, PLACES), window=0)
    assert (now.prefill, now.bucket, now.tokens) == (True, 3, 3)


def test_a_step_sees_what_the_cache_holds() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    now = pass_of(Call(mask, torch.tensor([[3], [2]])), window=5)
    assert (now.prefill, now.bucket) == (False, 1)
    held = now.mask(SimpleNamespace(max_length=6))
    assert held.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert now.positions.tolist() == [[3], [2]]
