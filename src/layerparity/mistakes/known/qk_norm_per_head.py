"""RMSNorm of queries and keys per head after the reshape, where the model norms over all heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import epsilon_name, find, head_dim, rms, spans_heads
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import BY_HEAD, NORMS, between_heads, norm_check, normed_by_head


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


# Of the variance between heads, what lies between shares of several where their heads are alike.
_AS_MUCH = 0.99


class PerHead:
    """A norm over each head by itself gives the candidate's numbers."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm is taken head by head."""
        if evidence.component not in NORMS:
            return None
        reasons = [f"{evidence.local} fails and the projection before it passes"]
        text = "the norm is taken over each head by itself; the model takes it over all heads"
        check = norm_check(evidence)
        if check is None:
            return _by_variance(evidence, text, reasons)
        by_head = partial(normed_by_head, epsilon=check.epsilon, heads=check.heads)
        if check.heads == 1 or not check.shows(by_head):
            return None
        reasons.append("a norm over each head by itself gives its numbers to rounding")
        degree = evidence.fact("tp_degree", 1)
        if degree < check.heads:
            return Cause("qk_norm_per_head", text, reasons, grade=SHOWN)
        text = (
            f"each of {degree} ranks takes the norm of its own heads, or each head is normed by "
            "itself: with one head a rank both are the same; the model norms all heads together"
        )
        alike = ("qk_norm_per_head",)
        return Cause("qk_norm_per_rank", text, reasons, grade=SHOWN, alike=alike)


def _by_variance(evidence: Evidence, text: str, reasons: list[str]) -> Cause | None:
    """Return the cause where the slopes of a head's channels are alike, and those of heads not."""
    query = evidence.component.endswith("q_norm")
    heads = evidence.fact("num_attention_heads" if query else "num_key_value_heads")
    slopes = evidence.profile("channel")
    between = between_heads(slopes, heads)
    if between is None or between < BY_HEAD or evidence.blamed:
        return None
    shares = [count for count in range(2, heads) if heads % count == 0]
    if any((between_heads(slopes, count) or 0.0) >= _AS_MUCH * between for count in shares):
        # The heads of a share are off alike, as a rank's own are.
        return None
    reasons.append(
        f"{between:.0%} of the variance of the channels' slopes is between heads: "
        "within a head all channels are off alike"
    )
    return Cause("qk_norm_per_head", text, reasons, grade=SIGNS)


RULE = PerHead()
