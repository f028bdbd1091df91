"""offset: a constant was added, or a bias was dropped."""

from __future__ import annotations

from layerparity.ground.numeral import percent
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.routers import GATES

_TEXT = "a constant is added or missing: look for a bias that was dropped, or a mean"


class Offset:
    """Every token is off by the same numbers, whatever its values are."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one constant a channel explains the error."""
        own = evidence.values(evidence.local)
        if own is None or evidence.component in GATES:
            return None
        constant = (own.candidate - own.golden).mean(0, keepdim=True)
        if not own.shows(own.golden + constant):
            return None
        size = float(constant.norm() / own.golden.square().mean(0).sqrt().norm())
        reasons = [f"one constant a channel, {percent(size)} of the values, gives its numbers"]
        return Cause("offset", _TEXT, reasons, grade=SHOWN)


RULE = Offset()
