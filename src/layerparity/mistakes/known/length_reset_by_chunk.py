"""Each chunk is written from the first slot on."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, written_elsewhere


def change_state(state: RequestState) -> None:
    """Write every pass from slot 0."""

    def slots(own: torch.Tensor, start: torch.Tensor, room: int) -> torch.Tensor:
        return own

    written_elsewhere(state, slots)


STATE = Fault(
    "length_reset_by_chunk",
    "the cache's length is reset by each pass: a chunk is written over the one before it",
    component="self_attn",
    cause="length_reset_by_chunk",
    keeps=OF_KEYS,
    state=change_state,
    shown_by=("chunk", "draft"),
)
