"""swiglu_bias_dropped: the feed-forward activation is another variant."""

from __future__ import annotations

from layerparity.causes._shape import factor_share, percent
from layerparity.causes.base import Cause, Evidence

# What only a configuration with the clamped activation has.
_CLAMPED = "swiglu_limit"


class SwigluVariant:
    """The experts' output is related to the golden's, and off by more than a factor."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a feed-forward output is moderately off, its weights in order."""
        if evidence.component not in ("mlp.experts", "mlp") or evidence.blamed:
            return None
        error, pearson = evidence.metric("rel_l2"), evidence.metric("pearson")
        if error is None or error < 0.02 or factor_share(evidence) > 0.95:
            return None
        related = pearson is None or pearson > 0.3
        reasons = [f"{evidence.local} is off by {percent(error)} on a good input"]
        if pearson is not None:
            reasons.append(f"it follows the golden's with a correlation of {pearson:.2f}")
        text = (
            "the activation is another variant: (up + 1) * glu against up * glu, a limit or an "
            "alpha left out, gelu for silu"
        )
        sure = 0.5 if related else 0.25
        if _CLAMPED in evidence.facts:
            reasons.append("this model's activation is clamped and has an (up + 1)")
            sure = 0.7
        return Cause("swiglu_bias_dropped", sure, text, reasons)


RULE = SwigluVariant()
