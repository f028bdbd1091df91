"""precision: a part is computed in a narrower type than the golden's."""

from __future__ import annotations

import math

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import factor_share, percent, spread

# About the relative L2 error of one operation on values rounded to each type.
STEPS = {"float8_e4m3": 2**-5, "bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-25}
_GROUPS = ("head", "channel", "expert")


class Precision:
    """The error is larger than the run's own rounding, and has no structure."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where what is left looks like rounding, of a coarser type."""
        error, times = evidence.metric("rel_l2"), evidence.metric("error_ratio")
        if not error or error > 0.1 or evidence.blamed:
            return None
        if times is None and evidence.metric("slope") is None:
            # Judged by no floor: nothing says that the error has no structure.
            return None
        share = factor_share(evidence)
        grouped = any(evidence.metric(f"slope_{each}_count") for each in _GROUPS)
        if (times is not None and times < 2) or share > 0.5 or grouped:
            return None
        reasons = []
        if times is not None:
            own = evidence.facts.get("dtype", "its type")
            reasons.append(f"it is {times:.3g} times the floor of rounding in {own}")
        reasons.append(f"the error has no structure: one factor explains {percent(share)}")
        uneven = spread(evidence.errors)
        if uneven < 1:
            reasons.append(f"tokens are off alike (spread {uneven:.0%})")
        # The type whose rounding step, half of it and up to a few, is nearest to the error.
        name = min(STEPS, key=lambda name: abs(math.log(error / STEPS[name])))
        text = f"a part is computed in a narrower type: {percent(error)} looks like {name}"
        return Cause("precision", 0.65 if uneven < 1 else 0.4, text, reasons)


RULE = Precision()
