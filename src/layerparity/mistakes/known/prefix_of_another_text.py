"""The first block is taken from a request with another text."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import BLOCK_TOKENS, keeps_keys, read_otherwise, slots_of


def change_state(state: RequestState) -> None:
    """Read the first block from the request before."""

    def reads(own: torch.Tensor, before: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.where(slots_of(own) < BLOCK_TOKENS, before, own)

    read_otherwise(state, reads)


STATE = Fault(
    "prefix_of_another_text",
    "the prefix cache hits another text: the first 16 tokens are those of the request before",
    component="self_attn",
    cause="prefix_of_another_text",
    why_not=keeps_keys,
    state=change_state,
    shown_by=("after",),
)
