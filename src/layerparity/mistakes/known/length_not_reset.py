"""A request is written behind the one before it."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import counted, keeps_keys, written_elsewhere


def change_state(state: RequestState) -> None:
    """Write from where the request before ended, and read from the first slot on."""
    if state.before is None or not hasattr(state.before, "cumulative_length"):
        return
    ended = counted(state.before).clone()

    def slots(own: torch.Tensor, start: torch.Tensor, room: int) -> torch.Tensor:
        return (own + start + ended.to(start.device)) % room

    written_elsewhere(state, slots)


STATE = Fault(
    "length_not_reset",
    "the cache's length is not reset: a request is written behind the one before it",
    component="self_attn",
    cause="length_not_reset",
    why_not=keeps_keys,
    state=change_state,
    shown_by=("after",),
)
