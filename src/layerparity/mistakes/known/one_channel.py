"""one_channel: a single channel is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import percent


class OneChannel:
    """The slopes of all channels but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few channels are beyond the limits."""
        count = evidence.metric("slope_channel_count")
        total = len(evidence.profile("channel"))
        if not count or count > max(1, total // 16):
            return None
        index, slope = evidence.metric("slope_channel_index"), evidence.metric("slope_channel")
        which = "" if index is None else f" (channel {index:.0f})"
        reasons = [f"{count:.0f} channel is beyond the limits{which}, all others are clean"]
        if slope is not None:
            reasons.append(f"it is off by {percent(slope)}")
        text = f"one channel is wrong{which}: an index that is off, or one damaged row of a weight"
        return Cause("one_channel", 0.7, text, reasons)


RULE = OneChannel()
