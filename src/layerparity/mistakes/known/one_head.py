"""one_head: a single attention head is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import alone
from layerparity.mistakes.cause import SHOWN, Cause, Evidence


class OneHead:
    """All heads but one are right to rounding."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one head is wrong and all others are right."""
        seen = alone(evidence, "head")
        if seen is None:
            return None
        which, reasons = seen
        text = f"one head is wrong{which}, and all others are right: that says where, and not why"
        return Cause("one_head", text, reasons, grade=SHOWN)


RULE = OneHead()
