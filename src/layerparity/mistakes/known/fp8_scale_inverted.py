"""FP8 weights are divided by their scales, as the name weight_scale_inv suggests."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.unpacking import OF_FACTORS
from layerparity.numbers.pieces import FP8


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Divide the stored FP8 numbers by their scales."""
    for each in surgery.quantised():
        each.put(lambda pieces: pieces._replace(scales=1 / pieces.scales).values())


FAULT = Fault(
    "fp8_scale_inverted",
    "divided by weight_scale_inv where it multiplies",
    component="self_attn.q_proj",
    cause="fp8_scale",
    by_weights=True,
    quantised=(FP8,),
    refines=OF_FACTORS,
    plant=plant,
)
