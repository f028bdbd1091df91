"""The norm weights of all heads are averaged into those of one."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.faults._block import find, head_dim, spans_heads
from layerparity.faults.base import Fault, Surgery


def _apply(block: nn.Module, surgery: Surgery) -> None:
    for name in ("q_norm", "k_norm"):
        weight = find(block, f"self_attn.{name}.weight")
        heads = weight.data.float().view(-1, head_dim(block))
        with torch.no_grad():
            weight.copy_(heads.mean(0).expand_as(heads).reshape(-1))


FAULT = Fault(
    "qk_norm_averaged",
    "per-head norm weights averaged into one",
    component="self_attn.q_norm",
    cause="qk_norm_averaged",
    by_weights=True,
    applies=spans_heads,
    apply=_apply,
)
