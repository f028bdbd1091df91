"""The weight converter deletes the router's correction bias: it stays zero."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.faults._block import CORRECTION, find, needs
from layerparity.faults.base import Fault, Surgery


def _apply(block: nn.Module, surgery: Surgery) -> None:
    with torch.no_grad():
        find(block, CORRECTION).zero_()


FAULT = Fault(
    "router_bias_dropped",
    "the weight converter deleted e_score_correction_bias",
    component="mlp.gate",
    cause="router_bias_dropped",
    by_weights=True,
    applies=needs(CORRECTION),
    apply=_apply,
    never_loaded=(CORRECTION,),
)
