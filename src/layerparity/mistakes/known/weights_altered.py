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
            # What is there twice is the tensor whose values stand in the place of another's.
            text = f"{first.holds[0]} is in the graph twice, also in the place of {first.name}: "
        text += "the weight conversion is wrong"
        return Cause("weights_altered", 0.8, text, findings=findings, grade=WEIGHTS)


_HOW = {"reordered": "in another order"}


RULE = WeightsAltered()
