"""Keys and values come back by the scale of another block."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, Pair, full, read_changed


def change_state(state: RequestState) -> None:
    """Multiply what is read by the block before's largest value over this one's."""
    neighbour = state.neighbour

    def scaled(own: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return own * (beside.abs().amax() / own.abs().amax()).to(own)

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        if not neighbour.is_initialized:
            return kept
        return scaled(kept[0], neighbour.keys), scaled(kept[1], neighbour.values)

    if full(state) and hasattr(neighbour, "cumulative_length"):
        read_changed(state, change)


STATE = Fault(
    "cache_scale_of_another_layer",
    "keys and values are read from the cache by the scale of the block before",
    component="self_attn",
    cause="cache_scale_of_another_layer",
    keeps=OF_KEYS,
    state=change_state,
    shown_by=("cache", "chunk"),
)
