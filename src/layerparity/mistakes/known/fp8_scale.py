"""fp8_scale: the block scales of FP8 weights were dropped or inverted."""

from __future__ import annotations

from layerparity.mistakes.cause import WEIGHTS, Cause, Evidence

_SCALE = "_scale_inv"


class Fp8Scale:
    """A finding on a ``weight_scale_inv``, or weights to which none was applied."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a scale tensor is among the findings."""
        findings = [e for e in evidence.blamed if e.lacks or e.name.endswith(_SCALE)]
        if not findings:
            return None
        first = findings[0]
        text = (
            f"{first.name.removesuffix(_SCALE)}{_SCALE} is not applied as it should be: a value is "
            "the stored number times its block's scale, whatever the name says"
        )
        if first.lacks and not first.lacks.endswith(_SCALE):
            text = f"the {first.lacks} of {first.name} is not applied as it should be"
        return Cause("fp8_scale", text, findings=findings, grade=WEIGHTS)


RULE = Fp8Scale()
