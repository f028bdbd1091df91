"""Mistakes of unpacking: each packed weight of a block gets the values of another reading."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.numbers.pieces import IN_BLOCKS, Pieces

Values = Callable[[Pieces], torch.Tensor]
INTEGERS = ("INT4", "INT8")
# What tensors show of scales that are wrong: a factor, or one for each channel.
OF_FACTORS = ("scale", "one_factor_each")
EVERY = (*INTEGERS, "MXFP4", "NVFP4", *IN_BLOCKS)


def unpacked_as(name: str, says: str, values_of: Values, formats: tuple[str, ...] = EVERY) -> Fault:
    """Return a mistake that gives each weight in one of ``formats`` the values [row, column] so.

    ``says`` is the `Fault`'s.
    """
    return Fault(
        name,
        says,
        component="self_attn.q_proj",
        cause="weights_altered",
        by_weights=True,
        quantised=formats,
        plant=partial(_plant, values_of),
        refines=OF_FACTORS,
    )


def _plant(values_of: Values, block: nn.Module, surgery: Surgery) -> None:
    for each in surgery.quantised():
        each.put(values_of)
