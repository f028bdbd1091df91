"""scale: the output is the golden's times a constant."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import CONSTANT, factor_share, percent, spread


class Scale:
    """One factor explains the error, and every token is off alike."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a pure factor is left."""
        share, slope = factor_share(evidence), evidence.metric("slope")
        pearson = evidence.metric("pearson")
        related = pearson is None or pearson > 0.95
        if slope is None or share < 0.9 or not related:
            return None
        uneven = spread(evidence.errors)
        if uneven > CONSTANT and share < 0.99:
            return None
        factor = 1 + slope
        reasons = [f"one factor explains {percent(share)} of the error"]
        ratio = evidence.metric("norm_ratio")
        if ratio is not None:
            reasons.append(f"its norm is {ratio:.4g} times the golden's")
        if uneven <= CONSTANT:
            reasons.append(f"every token is off alike (spread {uneven:.0%})")
        text = f"everything is {factor:.4g} times the golden's: a wrong or missing constant factor"
        if 0.5 < factor < 2:
            text += ", a wrong epsilon, or a weight that was scaled"
        return Cause("scale", 0.82, text, reasons)


RULE = Scale()
