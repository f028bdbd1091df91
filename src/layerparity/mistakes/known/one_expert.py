"""one_expert: a single expert is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import percent


class OneExpert:
    """The slopes of all experts but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few experts are beyond the limits."""
        count = evidence.metric("slope_expert_count")
        total = len(evidence.profile("expert"))
        if not count or count > max(1, total // 16):
            return None
        index, slope = evidence.metric("slope_expert_index"), evidence.metric("slope_expert")
        which = "" if index is None else f" (expert {index:.0f})"
        reasons = [f"{count:.0f} expert is beyond the limits{which}, all others are clean"]
        if slope is not None:
            reasons.append(f"it is off by {percent(slope)}")
        text = f"one expert is wrong{which}: its weights come from elsewhere, or a shard lost it"
        return Cause("one_expert", 0.75, text, reasons)


RULE = OneExpert()
