"""The norm's weights of the heads stand in another order than the heads.

Their prints show it, as they do any weight in another order.
"""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, head_dim, spans_heads
from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Give every head the norm weights of the head before it."""
    for name in ("q_norm", "k_norm"):
        weight = find(block, f"self_attn.{name}.weight")
        with torch.no_grad():
            weight.copy_(weight.roll(head_dim(block)))


FAULT = Fault(
    "qk_norm_heads_permuted",
    "heads were reordered for the ranks, and their norm weights were not",
    component="self_attn.q_norm",
    cause="weights_altered",
    by_weights=True,
    why_not=spans_heads,
    plant=plant,
)
