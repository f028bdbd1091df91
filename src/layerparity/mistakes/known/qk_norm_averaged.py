"""The norm weights of all heads are averaged into those of one."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from layerparity.mistakes.block import find, head_dim, spans_heads
from layerparity.mistakes.cause import SHOWN, WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import NORMS, norm_check, rms_normed
from layerparity.record.weights import Fate


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
    """The mean of all heads' weights, or another weight, gives the candidate's numbers."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm is right but for its weight."""
        if evidence.component not in NORMS:
            return None
        altered = evidence.findings_of("changed_value", component=evidence.component)
        fates = [each for each in altered if each.fate is Fate.AVERAGED]
        reasons = [f"{evidence.local} fails and the projection before it passes"]
        check = norm_check(evidence)
        if check is None or check.heads == 1:
            # The prints tell an average, or nothing does.
            return Cause("qk_norm_averaged", _TEXT, reasons, fates, WEIGHTS) if fates else None
        mean = check.weight.unflatten(-1, (check.heads, -1)).mean(0).repeat(check.heads)
        if not check.shows(partial(rms_normed, epsilon=check.epsilon), mean):
            return None
        reasons.append("the mean of all heads' weights gives its numbers to rounding")
        return Cause("qk_norm_averaged", _TEXT, reasons, fates, SHOWN)


_TEXT = "its weight is not the checkpoint's: per-head weights averaged into one"


RULE = Averaged()
