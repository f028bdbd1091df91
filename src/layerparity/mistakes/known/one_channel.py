"""one_channel: a single channel is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import alone
from layerparity.mistakes.cause import HINTS, SHOWN, Cause, Evidence
from layerparity.mistakes.shape import lone


class OneChannel:
    """All channels but one are right to rounding; or the slopes of all but very few are clean."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one channel is wrong and all others are right."""
        shown = alone(evidence, "channel")
        seen = shown or (
            lone(evidence, "channel") if evidence.values(evidence.local) is None else None
        )
        if seen is None:
            return None
        which, reasons = seen
        text = (
            f"one channel is wrong{which}, and all others are right: that says where, and not why"
        )
        return Cause("one_channel", 0.7, text, reasons, grade=SHOWN if shown else HINTS)


RULE = OneChannel()
