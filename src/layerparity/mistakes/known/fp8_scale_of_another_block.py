"""Each block of FP8 numbers is multiplied by the scale of the block before it.

The weights' prints show it, as they do any value that changed.
"""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.fault import Fault, Quantised, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Multiply by the scales moved by one block of rows; by one of columns where rows are few."""
    with torch.no_grad():
        for each in surgery.quantised():
            each.value.copy_(each.numbers * _moved(each))


def _moved(weight: Quantised) -> torch.Tensor:
    """Return the scales [row, column] that the numbers are multiplied by, of the wrong blocks."""
    rows, columns = weight.block
    by_block = weight.scales[..., ::rows, ::columns]
    axis = -2 if by_block.shape[-2] > 1 else -1
    moved = by_block.roll(1, axis)
    wide = moved.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : weight.numbers.shape[-2], : weight.numbers.shape[-1]]


FAULT = Fault(
    "fp8_scale_of_another_block",
    "the scales of FP8 weights were laid on the wrong blocks",
    component="self_attn.q_proj",
    cause="weights_altered",
    by_weights=True,
    quantised=True,
    plant=plant,
)
