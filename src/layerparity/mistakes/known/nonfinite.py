"""nonfinite: NaN or Inf where the golden has numbers."""

from __future__ import annotations

from layerparity.mistakes.cause import SHOWN, Cause, Evidence


class Nonfinite:
    """An overflow, a division by zero, or memory that was never written."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where NaN or Inf stand on one side only."""
        count = evidence.metric("nonfinite_disagreement")
        if not count:
            return None
        text = "NaN or Inf arise here: an overflow in a narrow type, a fully masked row, or a 0 / 0"
        reasons = [f"{count:.0f} values of {evidence.local} are NaN or Inf on one side only"]
        return Cause("nonfinite", text, reasons, grade=SHOWN)


RULE = Nonfinite()
