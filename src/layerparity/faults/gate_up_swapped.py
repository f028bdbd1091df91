"""The gate and up halves of the gated MLP are stacked the wrong way round."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.faults._block import find, lacking
from layerparity.faults._parts import halves, weight_halves
from layerparity.faults.base import Fault, Surgery

_DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


def _applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    if not lacking(block, *_DENSE) or not lacking(block, "mlp.experts.gate_up_proj"):
        return ""
    return "this block has no gated MLP"


def _apply(block: nn.Module, surgery: Surgery) -> None:
    experts = find(block, "mlp.experts")
    if lacking(block, "mlp.experts.gate_up_proj"):
        _swap(*(find(block, path).data for path in _DENSE))
        return
    _swap(*weight_halves(experts, experts.gate_up_proj.data))
    bias = getattr(experts, "gate_up_proj_bias", None)
    if bias is not None:
        _swap(*halves(experts, bias.data))


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


FAULT = Fault(
    "gate_up_swapped",
    "gate and up halves stacked the wrong way round",
    component="mlp.experts",
    cause="gate_up_swapped",
    by_weights=True,
    applies=_applies,
    apply=_apply,
)
