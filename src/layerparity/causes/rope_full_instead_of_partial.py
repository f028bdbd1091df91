"""rope_full_instead_of_partial: channels are rotated that should be left alone."""

from __future__ import annotations

from layerparity.causes._shape import blocks_of, percent
from layerparity.causes.base import Cause, Evidence
from layerparity.causes.rotary import growth_reasons


class FullRope:
    """Rotated q or k is wrong in the channels from ``rotary_dim`` on, which pass unrotated."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the channels that must not rotate have changed."""
        rotary, width = evidence.fact("rotary_dim"), evidence.fact("head_dim")
        slopes = evidence.profile("channel")
        if evidence.part != "rotary" or not 0 < rotary < width or not slopes:
            return None
        heads = blocks_of(slopes, len(slopes) // width)
        beyond = [abs(slope) for head in heads for slope in head[rotary:]]
        if not beyond or max(beyond) < 0.01:
            return None
        text = f"all {width} channels of a head are rotated; the model rotates the first {rotary}"
        return Cause(
            "rope_full_instead_of_partial",
            0.95,
            text,
            [
                f"channels {rotary} to {width - 1} should pass unrotated, and their slopes are off "
                f"by up to {percent(max(beyond))}",
                *growth_reasons(evidence),
            ],
        )


RULE = FullRope()
