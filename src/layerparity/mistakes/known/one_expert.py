"""one_expert: a single expert is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import lone


class OneExpert:
    """The slopes of all experts but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few experts are beyond the limits."""
        seen = lone(evidence, "expert")
        if seen is None:
            return None
        which, reasons = seen
        text = f"one expert is wrong{which}: its weights come from elsewhere, or a shard lost it"
        return Cause("one_expert", 0.75, text, reasons)


RULE = OneExpert()
