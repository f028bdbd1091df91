"""Each rank norms its own heads together, where the model norms over all heads of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import epsilon_name, find, head_dim, rms, spans_heads
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import NORMS, norm_check, normed_by_head

_RANKS = 2


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = spans_heads(block, dtype, phase)
    if gone:
        return gone
    heads = find(block, "self_attn.q_norm.weight").numel() // head_dim(block)
    return "" if heads % _RANKS == 0 else f"{heads} heads are not shared by {_RANKS} ranks"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Take the norms over each half of the heads, as two ranks would that do not speak."""
    for name in ("q_norm", "k_norm"):
        norm: Any = find(block, f"self_attn.{name}")

        def forward(values: torch.Tensor, norm: Any = norm) -> torch.Tensor:
            shares = values.unflatten(-1, (_RANKS, -1))
            normed = rms(shares, shares, getattr(norm, epsilon_name(norm))).flatten(-2)
            weighted: torch.Tensor = norm.weight * normed
            return weighted

        surgery.set(norm, "forward", forward)


FAULT = Fault(
    "qk_norm_per_rank",
    "each rank took the norm of its own heads, without a sum over the ranks",
    component="self_attn.q_norm",
    cause="qk_norm_per_rank",
    why_not=why_not,
    plant=plant,
    degree=_RANKS,
)


class PerRank:
    """A norm over equal shares of the heads, more than one each, gives the candidate's numbers."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm is taken share by share."""
        check = norm_check(evidence) if evidence.component in NORMS else None
        if check is None:
            return None
        for ranks in range(2, check.heads):
            shared = partial(normed_by_head, epsilon=check.epsilon, heads=ranks)
            if check.heads % ranks == 0 and check.shows(shared):
                text = f"the norm is taken over each of {ranks} shares of the heads, as ranks do"
                reasons = [f"norms over {ranks} shares of the heads give its numbers to rounding"]
                return Cause("qk_norm_per_rank", text, reasons, grade=SHOWN)
        return None


RULE = PerRank()
