"""The hand-written norm is right in the prefill and wrong where one token is computed at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from layerparity.faults._block import epsilon_name, find, lacking, rms
from layerparity.faults.base import Fault, Surgery

_NORMS = ("input_layernorm", "post_attention_layernorm")


def _applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    if phase != "decode":
        return "only where one token is computed at a time: a prefill is right"
    return lacking(block, *_NORMS)


def _apply(block: nn.Module, surgery: Surgery) -> None:
    for name in _NORMS:
        norm = find(block, name)
        surgery.wrap(norm, partial(_compiled_twice, norm))


def _compiled_twice(norm: Any, prefill: Callable[..., Any]) -> Callable[..., Any]:
    epsilon = getattr(norm, epsilon_name(norm))

    def forward(values: torch.Tensor) -> Any:
        if values.shape[-2] != 1:
            return prefill(values)
        # The small kernel sums the squares of its first tile of channels only.
        tile = values[..., : values.shape[-1] // 2]
        return norm.weight * rms(values, tile, epsilon)

    return forward


FAULT = Fault(
    "rmsnorm_prefill_vs_decode",
    "the hand-written norm compiled differently for prefill and for token generation",
    component="input_layernorm",
    cause="rmsnorm_prefill_vs_decode",
    applies=_applies,
    apply=_apply,
)
