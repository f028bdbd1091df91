"""rotary: queries and keys are turned by the wrong angles."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import median, trend

# A relative error that a few roundings in bfloat16 add up to.
_ROUNDED = 0.03


class Rotary:
    """The error grows with the position, and token 0, which is not turned, is right."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where rotated q or k fails, or an error grows from a perfect token 0."""
        own = evidence.component in ("self_attn", "")
        if not own or not evidence.local.startswith("self_attn:"):
            return None
        rotated = evidence.part == "rotary"
        growing = growth_reasons(evidence)
        # Queries and keys that pass as they were rotated are right: what is wrong comes later.
        right = all(evidence.passed(f"self_attn:{each}_rotated") for each in "qk")
        if not rotated and (right or not growing):
            return None
        has_floor = evidence.metric("error_ratio") is not None
        if not has_floor and evidence.errors and median(evidence.errors) < _ROUNDED:
            # Token 0 is not turned, and so is exact in any case; the others round.
            return None
        reasons = [f"{evidence.local} fails and what it is made of passes"] if rotated else []
        sure = {(True, True): 0.92, (True, False): 0.6, (False, True): 0.65}[rotated, bool(growing)]
        wide = evidence.fact("rotary_dim"), evidence.fact("head_dim")
        partial = f", and rotary_dim ({wide[0]} of {wide[1]})" if 0 < wide[0] < wide[1] else ""
        text = f"rotary embedding is wrong: look at rope_theta, the pairing of channels{partial}"
        return Cause("rotary", sure, text, [*reasons, *growing])


def growth_reasons(evidence: Evidence) -> list[str]:
    """Return what shows that the error grows with position from a right token 0; else nothing."""
    errors, positions = evidence.errors, evidence.tokens.position
    if len(errors) != len(positions) or len(errors) < 4:
        return []
    middle = median(errors)
    first = max((e for e, at in zip(errors, positions, strict=True) if at == 0), default=middle)
    if not middle or first > 0.05 * middle:
        return []
    grown = trend(errors, positions)
    reasons = [f"token 0 is right: {first:.2g} against {middle:.2g} in the middle"]
    if grown > 0.3:
        reasons.append(f"the error grows with the position (rank correlation {grown:.2f})")
    return reasons


RULE = Rotary()
