"""The last block is read where the request before had it."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_TOKENS, keeps_keys, read_otherwise, slots_of


def change_state(state: RequestState) -> None:
    """Read the last block that is begun from the request before."""

    def reads(own: torch.Tensor, before: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        last = slots_of(own) // BLOCK_TOKENS == (count - 1) // BLOCK_TOKENS
        return torch.where(last, before, own)

    read_otherwise(state, reads)


STATE = Fault(
    "block_table_stale",
    "the block table is that of the request before: the last block of 16 tokens is read from it",
    component="self_attn",
    cause="block_table_stale",
    why_not=keeps_keys,
    state=change_state,
    shown_by=("after",),
)
