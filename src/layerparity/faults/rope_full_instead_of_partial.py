"""Every dimension of a head is rotated, where the model rotates the first few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layerparity.faults._block import head_dim
from layerparity.faults._rotary import parameters, plain, tables, width
from layerparity.faults.base import Fault, Pass


def _applies(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    reason = plain(block)
    if not reason and width(block) == head_dim(block):
        return "this model rotates whole heads by design"
    return reason


def _arguments(arguments: Mapping[str, Any], given: Pass) -> dict[str, Any]:
    config = given.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = parameters(config)["rope_theta"]
    made = tables(given.position_ids, int(size), theta, given.dtype)
    return {**arguments, "position_embeddings": made}


FAULT = Fault(
    "rope_full_instead_of_partial",
    "all dimensions of a head rotated, the model rotates the first few",
    component="self_attn",
    cause="rope_full_instead_of_partial",
    applies=_applies,
    arguments=_arguments,
)
