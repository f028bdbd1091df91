"""The last block is read where the request before had it."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_SIZES, OF_KEYS, read_otherwise, slots_of


def _of(size: int) -> Fault:
    """Return the mistake in a cache of blocks of ``size`` tokens."""

    def reads(own: torch.Tensor, before: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.where(slots_of(own) // size == (count - 1) // size, before, own)

    def change_state(state: RequestState) -> None:
        read_otherwise(state, reads)

    return Fault(
        "block_table_stale",
        f"the block table is that of the request before: the last block of {size} tokens is its",
        component="self_attn",
        cause="block_table_stale",
        keeps=OF_KEYS,
        state=change_state,
        shown_by=("after",),
    )


STATES = tuple(map(_of, BLOCK_SIZES))
STATE = STATES[0]
