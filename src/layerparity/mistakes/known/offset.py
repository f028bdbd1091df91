"""offset: a constant was added, or a bias was dropped."""

from __future__ import annotations

from layerparity.ground.numeral import numeral, percent
from layerparity.mistakes.cause import HINTS, SHOWN, Cause, Evidence
from layerparity.mistakes.routers import GATES

_TEXT = "a constant is added or missing: look for a bias that was dropped, or a mean"


class Offset:
    """Every token is off by the same numbers, whatever its values are."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one constant a channel explains the error."""
        own = evidence.values(evidence.local)
        if evidence.component in GATES:
            return None
        if own is not None:
            constant = (own.candidate - own.golden).mean(0, keepdim=True)
            if not own.shows(own.golden + constant):
                return None
            size = float(constant.norm() / own.golden.square().mean(0).sqrt().norm())
            reasons = [f"one constant a channel, {percent(size)} of the values, gives its numbers"]
            return Cause("offset", 0.9, _TEXT, reasons, grade=SHOWN)
        offset, certain = evidence.metric("offset"), evidence.metric("offset_z")
        if offset is None or certain is None or abs(certain) < 6:
            return None
        if abs(evidence.metric("slope_z") or 0.0) > abs(certain):
            return None
        reasons = [
            f"the difference has a mean of {numeral(offset)} floors of rounding, "
            f"{abs(certain):.0f} sigmas from none"
        ]
        return Cause("offset", 0.6, _TEXT, reasons, grade=HINTS)


RULE = Offset()
