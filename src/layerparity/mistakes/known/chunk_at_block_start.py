"""A chunk that begins within a block of slots is written from the block's start."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_TOKENS, keeps_keys, written_elsewhere


def change_state(state: RequestState) -> None:
    """Write a chunk from the first slot of the block that it begins in."""

    def slots(own: torch.Tensor, start: torch.Tensor, room: int) -> torch.Tensor:
        return own + start - start % BLOCK_TOKENS

    written_elsewhere(state, slots)


STATE = Fault(
    "chunk_at_block_start",
    "a chunk that begins within a block of 16 slots is written from the block's first slot",
    component="self_attn",
    cause="chunk_at_block_start",
    why_not=keeps_keys,
    state=change_state,
    shown_by=("chunk", "draft"),
)
