"""RMSNorm of queries and keys per head after the reshape, where the model norms over all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.faults._block import epsilon_name, find, head_dim, rms, spans_heads
from layerparity.faults.base import Fault, Surgery


def _apply(block: nn.Module, surgery: Surgery) -> None:
    for name in ("q_norm", "k_norm"):
        _plant(find(block, f"self_attn.{name}"), head_dim(block), surgery)


def _plant(norm: Any, size: int, surgery: Surgery) -> None:
    epsilon = getattr(norm, epsilon_name(norm))

    def forward(values: torch.Tensor) -> torch.Tensor:
        heads = values.reshape(*values.shape[:-1], -1, size)
        scaled: torch.Tensor = norm.weight * rms(heads, heads, epsilon).reshape(values.shape)
        return scaled

    surgery.set(norm, "forward", forward)


FAULT = Fault(
    "qk_norm_per_head",
    "RMSNorm per head after the reshape, instead of over all heads before it",
    component="self_attn.q_norm",
    cause="qk_norm_per_head",
    applies=spans_heads,
    apply=_apply,
)
