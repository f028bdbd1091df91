"""A window's ring overwrites the oldest key one token too early."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_WINDOW, Pair, read_changed


def change_state(state: RequestState) -> None:
    """Put the newest key where the oldest one is that is still seen."""

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        keys, values = (
            torch.cat([each[:, :, :1], own[:, :, 1:]], 2)
            for own, each in zip(kept, new, strict=True)
        )
        return (keys, values) if was_full else kept

    if getattr(state.cached, "is_sliding", False):
        read_changed(state, change)


STATE = Fault(
    "ring_one_early",
    "the ring of a window is overwritten one token early: the oldest key is the newest one",
    component="self_attn",
    cause="ring_one_early",
    keeps=OF_WINDOW,
    state=change_state,
    shown_by=("chunk",),
)
