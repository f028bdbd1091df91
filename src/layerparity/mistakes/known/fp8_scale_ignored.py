"""The scales of FP8 weights are dropped: the stored numbers are taken as they are."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.unpacking import OF_FACTORS
from layerparity.numbers.pieces import FP8


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Use the stored FP8 numbers as they are."""
    for each in surgery.quantised():
        each.put(lambda pieces: pieces.numbers)


FAULT = Fault(
    "fp8_scale_ignored",
    "weight_scale_inv dropped while the FP8 weights were loaded",
    component="self_attn.q_proj",
    cause="fp8_scale",
    by_weights=True,
    quantised=(FP8,),
    refines=OF_FACTORS,
    plant=plant,
)
