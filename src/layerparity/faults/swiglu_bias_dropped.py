"""One class of layers loses the ``(up + 1)`` of its gated activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.faults._block import config_of, find, lacking
from layerparity.faults._parts import halves
from layerparity.faults.base import Fault, Surgery


def _applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    gone = lacking(block, "mlp.experts._apply_gate")
    if gone:
        return gone
    experts = find(block, "mlp.experts")
    probe = torch.zeros(1, 2)
    if not hasattr(experts, "alpha") or not _of_probe(experts, probe):
        return "this model's activation multiplies by up, not by (up + 1)"
    kinds = getattr(config_of(block), "layer_types", None) or []
    own = find(block, "self_attn.layer_type")
    if len(set(kinds)) > 1 and own == kinds[0]:
        return f"layers of class {own} keep their (up + 1)"
    return ""


def _of_probe(experts: Any, probe: torch.Tensor) -> bool:
    """Say whether a gate of 1 beside an up of 0 gives something."""
    gate, _ = halves(experts, probe)
    gate.fill_(1.0)
    return bool(experts._apply_gate(probe).abs().sum() > 0)


def _apply(block: nn.Module, surgery: Surgery) -> None:
    experts = find(block, "mlp.experts")

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = halves(experts, both)
        gate = gate.clamp(max=experts.limit)
        up = up.clamp(min=-experts.limit, max=experts.limit)
        return up * gate * torch.sigmoid(experts.alpha * gate)

    surgery.set(experts, "_apply_gate", gated)


FAULT = Fault(
    "swiglu_bias_dropped",
    "(up + 1) lost in one layer class; a test with only the other class saw nothing",
    component="mlp.experts",
    cause="swiglu_bias_dropped",
    applies=_applies,
    apply=_apply,
)
