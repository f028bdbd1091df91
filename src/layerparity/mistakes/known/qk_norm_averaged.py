"""The norm weights of all heads are averaged into those of one."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, head_dim, spans_heads
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.qk_norms import BY_HEAD, qk_norm


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Give every head the mean of all heads' norm weights."""
    for name in ("q_norm", "k_norm"):
        weight = find(block, f"self_attn.{name}.weight")
        heads = weight.data.float().view(-1, head_dim(block))
        with torch.no_grad():
            weight.copy_(heads.mean(0).expand_as(heads).reshape(-1))


FAULT = Fault(
    "qk_norm_averaged",
    "per-head norm weights averaged into one",
    component="self_attn.q_norm",
    cause="qk_norm_averaged",
    by_weights=True,
    why_not=spans_heads,
    plant=plant,
)


class Averaged:
    """Each channel is off by a constant of its own: the average over its own weight."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm is off by constants per channel."""
        seen = qk_norm(evidence)
        if seen is None:
            return None
        altered = evidence.findings_of("changed_value", "reordered", component=evidence.component)
        if not altered and (seen.constant is not True or evidence.blamed):
            return None
        sure = 0.92 if altered else 0.75
        reasons = [f"{seen.site} fails and the projection before it passes"]
        if seen.constant:
            reasons.append("each channel is off by a constant: its weight, not the norm, is wrong")
        if seen.between is not None and seen.between < BY_HEAD:
            reasons.append(f"only {seen.between:.0%} of the slopes' variance is between heads")
        text = "its weight is not the checkpoint's: per-head weights averaged into one, or shared"
        return Cause("qk_norm_averaged", sure, text, reasons, altered)


RULE = Averaged()
