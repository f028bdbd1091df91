"""FP8 weights are divided by their scales, as the name weight_scale_inv suggests."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Divide the stored FP8 numbers by their scales."""
    with torch.no_grad():
        for each in surgery.quantised():
            each.value.copy_(each.numbers / each.scales)


FAULT = Fault(
    "fp8_scale_inverted",
    "divided by weight_scale_inv where it multiplies",
    component="self_attn.q_proj",
    cause="fp8_scale",
    by_weights=True,
    quantised=True,
    plant=plant,
)
