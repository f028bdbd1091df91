"""offset: a constant was added, or a bias was dropped."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence


class Offset:
    """The error does not follow the values: it has an offset, and little slope."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the offset is clear and the slope is not."""
        offset, certain = evidence.metric("offset"), evidence.metric("offset_z")
        if offset is None or certain is None or abs(certain) < 6:
            return None
        slope = abs(evidence.metric("slope_z") or 0.0)
        if slope > abs(certain):
            return None
        text = "a constant is added or missing: look for a bias that was dropped, or a mean"
        reasons = [
            f"the difference has a mean of {offset:.3g} floors of rounding, "
            f"{abs(certain):.0f} sigmas from none"
        ]
        return Cause("offset", 0.6, text, reasons)


RULE = Offset()
