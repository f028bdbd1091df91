"""A fused kernel leaves the norm of queries and keys out."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import NORMS, norm_check


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


class Skipped:
    """The output is the projection's own, to the bit or to rounding."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a norm of queries or keys gives out what it was given."""
        if evidence.component not in NORMS:
            return None
        reasons = [f"{evidence.local} fails and the projection before it passes"]
        text = "the norm is left out: a fused attention kernel may not know it"
        check = norm_check(evidence)
        if evidence.metric("passed_through", evidence.local):
            reasons.append("it is the projection's output to the bit, and the golden's is not")
        elif check is not None and check.out.shows(check.given.candidate):
            reasons.append("it is the projection's output to rounding, and the golden's is not")
        else:
            return None
        return Cause("qk_norm_skipped", text, reasons, grade=SHOWN)


RULE = Skipped()
