"""The first block is taken from a request with another text."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_SIZES, OF_KEYS, read_otherwise, slots_of


def _of(size: int) -> Fault:
    """Return the mistake in a cache of blocks of ``size`` tokens."""

    def reads(own: torch.Tensor, before: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        # A block is taken where it is full.
        return torch.where((slots_of(own) < size) & (count >= size), before, own)

    def change_state(state: RequestState) -> None:
        read_otherwise(state, reads)

    return Fault(
        "prefix_of_another_text",
        f"the prefix cache hits another text: the first {size} tokens are the request before's",
        component="self_attn",
        cause="prefix_of_another_text",
        keeps=OF_KEYS,
        state=change_state,
        shown_by=("after",),
    )


STATES = tuple(map(_of, BLOCK_SIZES))
STATE = STATES[0]
