"""Each block of FP8 numbers is multiplied by the scale of the block before it.

The weights' prints show it, as they do any value that changed.
"""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.unpacking import OF_FACTORS
from layerparity.numbers.pieces import FP8, Pieces


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Multiply by the scales moved by one block of rows; by one of columns where rows are few."""
    for each in surgery.quantised():
        each.put(lambda pieces: pieces._replace(scales=_moved(pieces)).values())


def _moved(pieces: Pieces) -> torch.Tensor:
    """Return the scales [row, group] that the numbers are multiplied by, of the wrong blocks."""
    rows = pieces.numbers.shape[0]
    by_block = pieces.scales[:: pieces.height]
    moved = by_block.roll(1, 0 if len(by_block) > 1 else 1)
    return moved.repeat_interleave(pieces.height, 0)[:rows]


FAULT = Fault(
    "fp8_scale_of_another_block",
    "the scales of FP8 weights were laid on the wrong blocks",
    component="self_attn.q_proj",
    cause="weights_altered",
    by_weights=True,
    quantised=(FP8,),
    refines=OF_FACTORS,
    plant=plant,
)
