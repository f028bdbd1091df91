"""weights_altered: a tensor in the graph holds other values than the checkpoint."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence


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
        how = {"reordered": "in another order", "loaded_twice": "twice"}.get(first.what, "altered")
        text = f"{first.name} is in the graph {how}: the weight conversion is wrong"
        return Cause("weights_altered", 0.8, text, findings=findings)


RULE = WeightsAltered()
