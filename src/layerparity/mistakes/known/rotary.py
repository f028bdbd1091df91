"""rotary: queries and keys are turned by the wrong angles."""

from __future__ import annotations

import torch

from layerparity.anatomy.block import ROTARY
from layerparity.ground.numeral import numeral
from layerparity.mistakes.angles import which_angles
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.shape import median, trend
from layerparity.mistakes.turning import same_angles, turning_of

# A relative error that a few roundings in bfloat16 add up to.
_ROUNDED = 0.03


class Rotary:
    """Every pair of channels is turned, by another angle than the golden's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where rotated q or k fails, or an error grows from a perfect token 0."""
        own = evidence.component in ("self_attn", "")
        if not own or not evidence.local.startswith("self_attn:"):
            return None
        wide = evidence.fact("rotary_dim"), evidence.fact("head_dim")
        partial = f", and rotary_dim ({wide[0]} of {wide[1]})" if 0 < wide[0] < wide[1] else ""
        text = f"rotary embedding is wrong: look at rope_theta, the pairing of channels{partial}"
        turning = turning_of(evidence)
        if turning is None:
            return _by_growth(evidence, text)
        seen = [f"{evidence.local} fails and what it is made of passes", *growth_reasons(evidence)]
        padded = torch.tensor([row in evidence.tokens.padded for row in evidence.tokens.sequence])
        if bool(padded.any()) and same_angles(turning, ~padded):
            # Padded rows alone are a matter of positions.
            return None
        if turning.as_golden:
            return None
        if turning.still and turning.turns(turning.dims):
            text = "rotary embedding is applied in a layer that has none"
            seen.append("the golden turns nothing there, and angles give the candidate's numbers")
        elif turning.turns(turning.dims):
            seen.append("other angles in the same pairs give its numbers to rounding")
            which = which_angles(turning, evidence.tokens.position, evidence.facts)
            text = f"rotary embedding is wrong: {which}" if which else text
        elif turning.turns(turning.dims, neighbours=True):
            text = "rotary embedding pairs neighbouring channels, where the model pairs halves"
            seen.append("angles in pairs of neighbours give its numbers to rounding")
        else:
            return None
        return Cause("rotary", text, seen, grade=SHOWN)


def _by_growth(evidence: Evidence, text: str) -> Cause | None:
    """Return the cause where token 0, which is not turned, is right and the error grows."""
    rotated, growing = evidence.part == ROTARY, growth_reasons(evidence)
    if not rotated or not growing:
        return None
    has_floor = evidence.metric("error_ratio") is not None
    if not has_floor and evidence.errors and median(evidence.errors) < _ROUNDED:
        # Token 0 is not turned, and so is exact in any case; the others round.
        return None
    reasons = [f"{evidence.local} fails and what it is made of passes", *growing]
    return Cause("rotary", text, reasons, grade=SIGNS)


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
    reasons = [f"token 0 is right: {numeral(first, 2)} against {numeral(middle, 2)} in the middle"]
    if grown > 0.3:
        reasons.append(f"the error grows with the position (rank correlation {grown:.2f})")
    return reasons


RULE = Rotary()
