"""A fused kernel leaves the norm of queries and keys out."""

from __future__ import annotations

from torch import nn

from layerparity.faults._block import find, needs
from layerparity.faults.base import Fault, Surgery


def _apply(block: nn.Module, surgery: Surgery) -> None:
    for name in ("q_norm", "k_norm"):
        surgery.set(find(block, f"self_attn.{name}"), "forward", lambda values: values.clone())


FAULT = Fault(
    "qk_norm_skipped",
    "the fused kernel left the norm of queries and keys out",
    component="self_attn.q_norm",
    cause="qk_norm_skipped",
    applies=needs("self_attn.q_norm", "self_attn.k_norm"),
    apply=_apply,
)
