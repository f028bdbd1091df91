"""qk_norm_skipped: the norm of queries or keys is left out."""

from __future__ import annotations

from layerparity.causes._norms import qk_norm
from layerparity.causes.base import Cause, Evidence

# A share of variance from which on whole heads are off, as by a norm per head.
BY_HEAD = 0.6


class Skipped:
    """The output keeps the projection's size: its norm is far from the golden's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a q_norm or k_norm has another norm altogether."""
        seen = qk_norm(evidence)
        if seen is None or evidence.findings or seen.ratio is None:
            return None
        away = abs(seen.ratio - 1)
        if away < 0.05:
            return None
        reasons = [
            f"{seen.site} fails and the projection before it passes",
            f"its norm is {seen.ratio:.3g} of the golden's",
        ]
        sure = 0.86 if away > 0.25 else 0.6
        if seen.constant or (seen.between is not None and seen.between > BY_HEAD):
            sure = 0.3
        if seen.between is not None and seen.between <= BY_HEAD:
            reasons.append("its channels are off each by its own factor: the weight is missing")
        text = "the norm is left out: a fused attention kernel may not know it"
        return Cause("qk_norm_skipped", sure, text, reasons)


RULE = Skipped()
