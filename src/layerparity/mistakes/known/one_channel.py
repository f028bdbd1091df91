"""one_channel: a single channel is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import alone
from layerparity.mistakes.cause import SHOWN, Cause, Evidence


class OneChannel:
    """All channels but one are right to rounding."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one channel is wrong and all others are right."""
        seen = alone(evidence, "channel")
        if seen is None:
            return None
        which, reasons = seen
        text = (
            f"one channel is wrong{which}, and all others are right: that says where, and not why"
        )
        return Cause("one_channel", text, reasons, grade=SHOWN)


RULE = OneChannel()
