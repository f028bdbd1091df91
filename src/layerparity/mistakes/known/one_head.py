"""one_head: a single attention head is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import percent


class OneHead:
    """The slopes of all heads but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few heads are beyond the limits."""
        count = evidence.metric("slope_head_count")
        total = len(evidence.profile("head"))
        if not count or count > max(1, total // 16):
            return None
        index, slope = evidence.metric("slope_head_index"), evidence.metric("slope_head")
        which = "" if index is None else f" (head {index:.0f})"
        reasons = [f"{count:.0f} head is beyond the limits{which}, all others are clean"]
        if slope is not None:
            reasons.append(f"it is off by {percent(slope)}")
        text = f"one head is wrong{which}: a shard, a slice or a padded head"
        return Cause("one_head", 0.7, text, reasons)


RULE = OneHead()
