"""RMSNorm of queries and keys per head after the reshape, where the model norms over all heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import epsilon_name, find, head_dim, rms, spans_heads
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.qk_norms import BY_HEAD, qk_norm


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Take the norms over each head by itself."""
    for name in ("q_norm", "k_norm"):
        norm = find(block, f"self_attn.{name}")
        surgery.set(norm, "forward", _of_each_head(norm, head_dim(block)))


def _of_each_head(norm: Any, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    epsilon = getattr(norm, epsilon_name(norm))

    def forward(values: torch.Tensor) -> torch.Tensor:
        heads = values.reshape(*values.shape[:-1], -1, size)
        scaled: torch.Tensor = norm.weight * rms(heads, heads, epsilon).reshape(values.shape)
        return scaled

    return forward


FAULT = Fault(
    "qk_norm_per_head",
    "RMSNorm per head after the reshape, instead of over all heads before it",
    component="self_attn.q_norm",
    cause="qk_norm_per_head",
    why_not=spans_heads,
    plant=plant,
)


class PerHead:
    """Each head of each token is off by a factor of its own: its norm against that of all heads."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm fails head by head."""
        seen = qk_norm(evidence)
        if seen is None or evidence.blamed:
            return None
        sure, reasons = 0.5, [f"{seen.site} fails and the projection before it passes"]
        if seen.between is not None:
            sure = 0.93 if seen.between > BY_HEAD else 0.2
            reasons.append(
                f"{seen.between:.0%} of the variance of the channels' slopes is between heads: "
                "within a head all channels are off alike"
            )
        if seen.ratio is not None:
            reasons.append(f"its norm is {seen.ratio:.3g} of the golden's")
        text = "the norm is taken over each head by itself; the model takes it over all heads"
        return Cause("qk_norm_per_head", sure, text, reasons)


RULE = PerHead()
