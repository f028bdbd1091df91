"""rmsnorm_prefill_vs_decode: a norm compiled differently for token generation."""

from __future__ import annotations

from layerparity.causes.base import Cause, Evidence
from layerparity.site import DECODE
from layerparity.verdict import Outcome


class DecodeNorm:
    """A norm that fails in a decode step, and does not fail in the prefill."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only decoding shows a wrong norm."""
        if (
            evidence.site is None
            or evidence.site.phase != DECODE
            or "norm" not in evidence.component
        ):
            return None
        before = evidence.other_phase.get(evidence.local)
        if before is not None and before.outcome is Outcome.FAIL:
            return None
        reasons = [f"{evidence.local} fails at decode step {evidence.site.step}"]
        passes = before is not None and before.outcome is Outcome.PASS
        if passes:
            reasons.append("the same site passes in the prefill")
        text = "the norm is another one in the graph for token generation than in the prefill's"
        return Cause("rmsnorm_prefill_vs_decode", 0.92 if passes else 0.5, text, reasons)


RULE = DecodeNorm()
