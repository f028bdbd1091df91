"""The router scores experts by softmax where the model uses a sigmoid."""

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
    # A correction bias beside the router is what marks the sigmoid ones.
    return "this model's router uses softmax by design" if lacking(block, CORRECTION) else ""


def _apply(block: nn.Module, surgery: Surgery) -> None:
    gate = find(block, "mlp.gate")

    def forward(hidden: torch.Tensor, bias: torch.Tensor) -> Any:
        return route(gate, hidden, bias, softmax=True, normalise=True)

    surgery.set(gate, "forward", forward)


FAULT = Fault(
    "router_softmax",
    "softmax where the model uses sigmoid",
    component="mlp.gate",
    cause="router_softmax",
    applies=_applies,
    apply=_apply,
)
