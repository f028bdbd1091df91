"""qk_norm_per_head: the norm is taken per head, where the model spans all heads."""

from __future__ import annotations

from layerparity.causes._norms import qk_norm
from layerparity.causes.base import Cause, Evidence

# A share of variance from which on heads, not channels, are what differs.
BY_HEAD = 0.6


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
