"""A request is written behind the one before it."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, counted, read_otherwise, slots_of


def change_state(state: RequestState) -> None:
    """Write from where the request before ended, and read from the first slot on."""
    if not hasattr(state.before, "cumulative_length"):
        return
    ended = int(counted(state.before))

    def reads(own: torch.Tensor, before: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.where(slots_of(own) < ended, before, own.roll(ended, 2))

    read_otherwise(state, reads)


STATE = Fault(
    "length_not_reset",
    "the cache's length is not reset: a request is written behind the one before it",
    component="self_attn",
    cause="length_not_reset",
    keeps=OF_KEYS,
    state=change_state,
    shown_by=("after",),
)
