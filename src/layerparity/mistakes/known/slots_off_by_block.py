"""Keys and values are written a block of slots too far."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import (
    BLOCK_SIZES,
    OF_KEYS,
    Pair,
    full,
    read_changed,
    slots_of,
)


def _of(size: int) -> Fault:
    """Return the mistake in a cache of blocks of ``size`` tokens."""

    def shifted(own: torch.Tensor) -> torch.Tensor:
        # Nobody wrote the first block.
        return torch.where(slots_of(own) < size, 0, own.roll(size, 2))

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        return shifted(kept[0]), shifted(kept[1])

    def change_state(state: RequestState) -> None:
        if full(state):
            read_changed(state, change)

    return Fault(
        "slots_off_by_block",
        f"the slot mapping is off by one block: what is cached is written {size} slots too far",
        component="self_attn",
        cause="slots_off_by_block",
        keeps=OF_KEYS,
        state=change_state,
        shown_by=("cache", "chunk", "after"),
    )


STATES = tuple(map(_of, BLOCK_SIZES))
STATE = STATES[0]
