"""weights_altered: a tensor in the graph holds other values than the checkpoint."""

from __future__ import annotations

from layerparity.mistakes.cause import WEIGHTS, Cause, Evidence


class WeightsAltered:
    """Loaded twice, reordered or changed on the way, by its fingerprint."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a finding of the guilty component says so."""
        findings = evidence.findings_of(
            "changed_value", "reordered", "loaded_twice", component=evidence.component
        )
        if not findings:
            return None
        first = findings[0]
        text = f"{first.name} is in the graph {_HOW.get(first.what, 'altered')}: "
        if first.what == "loaded_twice" and first.holds:
            text = f"{first.name} was loaded from {first.holds[0]}: "
        text += "the weight conversion is wrong"
        return Cause("weights_altered", text, findings=findings, grade=WEIGHTS)


_HOW = {"reordered": "in another order"}


RULE = WeightsAltered()
