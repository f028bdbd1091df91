"""A chunk that begins within a block of slots is written from the block's start."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_SIZES, OF_KEYS, written_elsewhere


def _of(size: int) -> Fault:
    """Return the mistake in a cache of blocks of ``size`` tokens."""

    def slots(own: torch.Tensor, start: torch.Tensor, room: int) -> torch.Tensor:
        return own + start - start % size

    def change_state(state: RequestState) -> None:
        written_elsewhere(state, slots)

    return Fault(
        "chunk_at_block_start",
        f"a chunk that begins within a block of {size} slots is written from its first slot",
        component="self_attn",
        cause="chunk_at_block_start",
        keeps=OF_KEYS,
        state=change_state,
        shown_by=("chunk", "draft"),
    )


STATES = tuple(map(_of, BLOCK_SIZES))
STATE = STATES[0]
