"""Positions count padding: those of left-padded rows are not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layerparity.faults._block import needs
from layerparity.faults.base import Fault, Pass


def _arguments(arguments: Mapping[str, Any], given: Pass) -> dict[str, Any]:
    seen, new = given.attention_mask.shape[1], given.position_ids.shape[1]
    counted = torch.arange(seen - new, seen).expand_as(given.position_ids)
    changed = {**arguments, "position_embeddings": given.tables(counted)}
    if "position_ids" in arguments:
        changed["position_ids"] = counted
    return changed


FAULT = Fault(
    "position_ids_wrong",
    "positions count the padding on the left",
    component="self_attn",
    cause="position_ids_wrong",
    applies=needs("self_attn.head_dim"),
    arguments=_arguments,
)
