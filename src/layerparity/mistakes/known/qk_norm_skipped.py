"""A fused kernel leaves the norm of queries and keys out."""

from __future__ import annotations

import statistics

from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.qk_norms import BY_HEAD, QkNorm, qk_norm
from layerparity.mistakes.shape import finite


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Let the norms return what they are given."""
    for name in ("q_norm", "k_norm"):
        surgery.set(find(block, f"self_attn.{name}"), "forward", lambda values: values.clone())


FAULT = Fault(
    "qk_norm_skipped",
    "the fused kernel left the norm of queries and keys out",
    component="self_attn.q_norm",
    cause="qk_norm_skipped",
    why_not=needs("self_attn.q_norm", "self_attn.k_norm"),
    plant=plant,
)


# A spread of the channels' factors that no rounding has.
_SPREAD = 0.05
_TEXT = "the norm is left out: a fused attention kernel may not know it"


class Skipped:
    """The output is the projection's own, or keeps its size, or lacks the weight's pattern."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm does nothing, or seems to."""
        seen = qk_norm(evidence)
        if seen is None or evidence.blamed:
            return None
        reasons = [f"{seen.site} fails and the projection before it passes"]
        if evidence.metric("passed_through", seen.site):
            reasons.append("it is the projection's output to the bit, and the golden's is not")
            return Cause("qk_norm_skipped", 0.98, _TEXT, reasons)
        by_channel = seen.between is not None and seen.between <= BY_HEAD
        slopes = finite(evidence.profile("channel"))
        uneven = len(slopes) > 1 and statistics.pstdev(slopes) > _SPREAD
        sure = _by_size(seen)
        if by_channel and uneven:
            reasons.append("its channels are off each by its own factor: the weight is missing")
            if not seen.constant:
                sure = max(sure, 0.5)
        if seen.ratio is not None:
            reasons.append(f"its norm is {seen.ratio:.3g} of the golden's")
        return Cause("qk_norm_skipped", sure, _TEXT, reasons) if sure else None


def _by_size(seen: QkNorm) -> float:
    """Return how sure the norm ratio alone makes; 0 where it says nothing."""
    away = 0.0 if seen.ratio is None else abs(seen.ratio - 1)
    if away < _SPREAD:
        return 0.0
    if seen.constant or (seen.between is not None and seen.between > BY_HEAD):
        return 0.3
    return 0.86 if away > 0.25 else 0.6


RULE = Skipped()
