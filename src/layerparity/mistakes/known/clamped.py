"""clamped: numbers stop at a largest one, as those of an eight-bit type or of a clamp do."""

from __future__ import annotations

import torch

from layerparity.ground.numeral import numeral
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.values import Values

# What each type's largest number is called; Trainium's e4m3 stops where IEEE's does.
_LARGEST = {
    448.0: "the largest of float8_e4m3fn",
    240.0: "the largest of float8_e4m3 as Trainium has it",
    57344.0: "the largest of float8_e5m2",
    65504.0: "the largest of float16",
}
# Of one number, nobody can tell that it stopped.
_FEWEST = 2


class Clamped:
    """The golden's numbers, cut off where the candidate's end, are the candidate's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where both ends, or one, stop at a number that several share."""
        own = evidence.values(evidence.local)
        if own is None or evidence.component.endswith("gate"):
            return None
        for low, high in _ends(own):
            if own.shows(own.golden.clamp(low, high)):
                where = [numeral(end, 6) for end in (low, high) if end is not None]
                most = max(abs(end) for end in (low, high) if end is not None)
                known = _LARGEST.get(most, "")
                text = f"numbers are clamped at {' and '.join(where)}" + (known and f", {known}")
                reasons = ["the golden's numbers, clamped so, are the candidate's to rounding"]
                return Cause("clamped", text, reasons, grade=SHOWN)
        return None


def _ends(own: Values) -> list[tuple[float | None, float | None]]:
    """Return the ranges that a candidate may be clamped to: both ends, the upper or the lower."""
    low, high = (float(each) for each in own.candidate.aminmax())
    ends: list[tuple[float | None, float | None]] = []
    if not low < high:
        # A constant is no range.
        return ends
    below, above = (_stops(own, end, sign) for end, sign in ((low, -1), (high, 1)))
    if below and above:
        ends.append((low, high))
    if above:
        ends.append((None, high))
    if below:
        ends.append((low, None))
    return ends


def _stops(own: Values, end: float, sign: int) -> bool:
    """Say whether several numbers are at an end, and the golden's go on there."""
    held = own.candidate == end
    beyond = sign * (own.golden - end) > own.limit * abs(end)
    return (
        int(held.sum()) >= _FEWEST
        and bool(torch.equal(held & beyond, beyond))
        and bool(beyond.any())
    )


RULE = Clamped()
