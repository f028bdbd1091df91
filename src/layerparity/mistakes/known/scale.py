"""scale: the output is the golden's times a constant."""

from __future__ import annotations

from layerparity.ground.numeral import numeral, percent
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.shape import factor_of, factor_share, spread
from layerparity.mistakes.values import best_factor

# Tokens that are off by at most this part of their mean are off alike.
_ALIKE = 0.25
_NOTHING = 1e-6


class Scale:
    """One factor for all numbers and all tokens gives what the candidate has."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a pure factor is left."""
        own = evidence.values(evidence.local)
        if own is not None:
            factor = best_factor(own.golden, own.candidate)
            # Nothing at all is no multiple of something.
            if abs(factor) < _NOTHING or not own.shows(factor * own.golden):
                return None
            reasons = ["the golden's numbers times that factor are the candidate's to rounding"]
            return Cause("scale", _text(factor), reasons, grade=SHOWN)
        share, known = factor_share(evidence), factor_of(evidence)
        if known is None or share < 0.95 or spread(evidence.errors) > _ALIKE:
            return None
        reasons = [
            f"one factor explains {percent(share)} of the error",
            f"every token is off alike (spread {spread(evidence.errors):.0%})",
        ]
        return Cause("scale", _text(known), reasons, grade=SIGNS)


def _text(factor: float) -> str:
    text = (
        f"everything is {numeral(factor, 4)} times the golden's: a wrong or missing constant factor"
    )
    return f"{text}, or a weight that was scaled" if 0.5 < factor < 2 else text


RULE = Scale()
