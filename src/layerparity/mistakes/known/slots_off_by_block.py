"""Keys and values are written a block of slots too far."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_TOKENS, keeps_keys, written_elsewhere


def change_state(state: RequestState) -> None:
    """Write a block further than is read."""

    def slots(own: torch.Tensor, start: torch.Tensor, room: int) -> torch.Tensor:
        return (own + start + BLOCK_TOKENS) % room

    written_elsewhere(state, slots)


STATE = Fault(
    "slots_off_by_block",
    "the slot mapping is off by one block: what is cached is written 16 slots too far",
    component="self_attn",
    cause="slots_off_by_block",
    why_not=keeps_keys,
    state=change_state,
    shown_by=("cache", "chunk", "after"),
)
