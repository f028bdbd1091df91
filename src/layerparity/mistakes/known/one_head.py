"""one_head: a single attention head is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import alone
from layerparity.mistakes.cause import HINTS, SHOWN, Cause, Evidence
from layerparity.mistakes.shape import lone


class OneHead:
    """All heads but one are right to rounding; or the slopes of all but very few are clean."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one head is wrong and all others are right."""
        shown = alone(evidence, "head")
        seen = shown or (
            lone(evidence, "head") if evidence.values(evidence.local) is None else None
        )
        if seen is None:
            return None
        which, reasons = seen
        text = f"one head is wrong{which}, and all others are right: that says where, and not why"
        return Cause("one_head", 0.7, text, reasons, grade=SHOWN if shown else HINTS)


RULE = OneHead()
