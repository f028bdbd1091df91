"""Rows: of two tensors, the real tokens are laid beside each other, whatever the axes' order."""

from __future__ import annotations

import pytest
import torch

from layerparity.judge import rows
from layerparity.judge.rows import by_token, chunks, places

BATCH, TOKENS, HEADS, WIDTH = 2, 3, 4, 5
MASK = torch.tensor([[False, True, True], [True, True, True]])
# [batch, token, head, channel]
VALUES = torch.arange(float(BATCH * TOKENS * HEADS * WIDTH)).view(BATCH, TOKENS, HEADS, WIDTH)


@pytest.mark.parametrize(
    ("axes", "tensor"),
    [
        (("batch", "token", "head", "channel"), VALUES),
        (("batch", "head", "token", "channel"), VALUES.transpose(1, 2)),
        (("token", "batch", "head", "channel"), VALUES.transpose(0, 1)),
    ],
)
@pytest.mark.parametrize("size", [1 << 22, 1])
def test_the_tokens_that_a_mask_names_are_compared(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[str, ...], tensor: torch.Tensor, size: int
) -> None:
    monkeypatch.setattr(rows, "SIZE", size)
    assert torch.equal(by_token(tensor, axes), VALUES)
    found = list(chunks(tensor, tensor + 1, axes, MASK))
    assert len(found) == (1 if size > 1 else 5)
    golden, candidate = (
        torch.cat([getattr(each, side) for each in found]) for side in ("golden", "candidate")
    )
    assert torch.equal(golden, VALUES[MASK].flatten(1))
    assert torch.equal(candidate, golden + 1)


def test_a_tensor_without_sequences_has_one() -> None:
    alone = VALUES[0]
    assert torch.equal(by_token(alone, ("token", "head", "channel")), alone.unsqueeze(0))
    moved = by_token(alone.transpose(0, 1), ("head", "token", "channel"))
    assert torch.equal(moved, alone.unsqueeze(0))


def test_a_token_is_counted_from_the_first_real_one_of_its_sequence() -> None:
    assert places(torch.tensor([1, 2, 3, 5]), MASK) == [(0, 0), (0, 1), (1, 0), (1, 2)]
