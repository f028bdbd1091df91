"""The chosen experts' weights are not divided by their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.faults._block import CORRECTION, find, lacking, route
from layerparity.faults.base import Fault, Surgery


def _applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    gone = lacking(block, "mlp.gate")
    if gone:
        return gone
    if lacking(block, CORRECTION) and not getattr(find(block, "mlp.gate"), "norm_topk_prob", False):
        return "this model's router does not divide by the sum of the chosen"
    return ""


def _apply(block: nn.Module, surgery: Surgery) -> None:
    gate = find(block, "mlp.gate")
    if lacking(block, CORRECTION):
        surgery.set(gate, "norm_topk_prob", False)
        return

    def forward(hidden: torch.Tensor, bias: torch.Tensor) -> Any:
        return route(gate, hidden, bias, softmax=False, normalise=False)

    surgery.set(gate, "forward", forward)


FAULT = Fault(
    "router_topk_not_normalised",
    "the chosen experts' weights are not divided by their sum",
    component="mlp.gate",
    cause="router_topk_not_normalised",
    applies=_applies,
    apply=_apply,
)
