"""fp8_scale: the block scales of FP8 weights were dropped or inverted."""

from __future__ import annotations

from layerparity.causes.base import Cause, Evidence


class Fp8Scale:
    """A finding on a ``weight_scale_inv``, or altered weights whose finding speaks of a scale."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a scale tensor is among the findings."""
        found = [each for each in evidence.findings if "scale_inv" in each.name]
        if not found:
            return None
        text = (
            f"{found[0].name} is not applied as it should be: the value is weight * scale_inv, "
            "per block of 128 x 128"
        )
        return Cause("fp8_scale", 0.97, text, [each.text for each in found])


RULE = Fp8Scale()
