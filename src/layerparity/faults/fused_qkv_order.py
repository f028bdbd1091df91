"""Queries, keys and values are fused in another order than they are split in."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.faults._block import find, needs
from layerparity.faults.base import Fault, Surgery


def _apply(block: nn.Module, surgery: Surgery) -> None:
    for kind in ("weight", "bias"):
        q, k, v = (find(block, f"self_attn.{name}_proj.{kind}") for name in "qkv")
        if q is None:
            continue
        fused = torch.cat([k.data, v.data, q.data])
        with torch.no_grad():
            for mine, part in zip((q, k, v), fused.split([len(q), len(k), len(v)]), strict=True):
                mine.copy_(part)


FAULT = Fault(
    "fused_qkv_order",
    "Q, K and V were fused before the rename, in the wrong order",
    component="self_attn.q_proj",
    cause="fused_qkv_order",
    by_weights=True,
    applies=needs(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
    apply=_apply,
)
