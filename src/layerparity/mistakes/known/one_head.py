"""one_head: a single attention head is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import lone


class OneHead:
    """The slopes of all heads but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few heads are beyond the limits."""
        seen = lone(evidence, "head")
        if seen is None:
            return None
        which, reasons = seen
        text = f"one head is wrong{which}: a shard, a slice or a padded head"
        return Cause("one_head", 0.7, text, reasons)


RULE = OneHead()
