"""The scales of FP8 weights are dropped: the stored numbers are taken as they are."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Use the stored FP8 numbers as they are."""
    with torch.no_grad():
        for each in surgery.quantised():
            each.value.copy_(each.numbers)


FAULT = Fault(
    "fp8_scale_ignored",
    "weight_scale_inv dropped while the FP8 weights were loaded",
    component="self_attn.q_proj",
    cause="fp8_scale",
    by_weights=True,
    quantised=True,
    plant=plant,
)
