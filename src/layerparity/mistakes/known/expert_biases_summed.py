"""The biases of all experts' last projection were summed into one, which every token gets."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.fault import Fault, Surgery

_BIAS = "mlp.experts.down_proj_bias"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Give every expert the sum of all biases: the weights of a token's experts sum to one."""
    bias = find(block, _BIAS)
    with torch.no_grad():
        bias.copy_(bias.sum(0, keepdim=True).expand_as(bias))


FAULT = Fault(
    "expert_biases_summed",
    "the biases of all experts were summed into one",
    component="mlp.experts",
    cause="expert_biases",
    by_weights=True,
    why_not=needs(_BIAS),
    plant=plant,
)
