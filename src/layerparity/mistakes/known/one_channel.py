"""one_channel: a single channel is wrong."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import lone


class OneChannel:
    """The slopes of all channels but one, or very few, are those of a clean run."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where few channels are beyond the limits."""
        seen = lone(evidence, "channel")
        if seen is None:
            return None
        which, reasons = seen
        text = f"one channel is wrong{which}: an index that is off, or one damaged row of a weight"
        return Cause("one_channel", 0.7, text, reasons)


RULE = OneChannel()
