"""never_loaded: a tensor of the checkpoint never reached the graph."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence

# A correlation below this is no relation.
UNRELATED = 0.2


class NeverLoaded:
    """A weight finding says it outright; outputs unrelated to the golden's hint at it."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a tensor was not loaded, or a projection's output is random."""
        lost = evidence.findings_of("never_loaded", "missing", component=evidence.component)
        if lost:
            names = ", ".join(each.name for each in lost[:4])
            text = f"{names} never reached the graph: the port's key mapping does not know the name"
            return Cause("never_loaded", 0.96, text, findings=lost)
        pearson = evidence.metric("pearson")
        if evidence.blamed or not evidence.local.endswith("_proj:out") or pearson is None:
            return None
        if abs(pearson) > UNRELATED:
            return None
        text = (
            f"the weights of {evidence.component} are not the checkpoint's: never loaded, or others"
        )
        return Cause(
            "never_loaded",
            0.6,
            text,
            [f"its output has nothing to do with the golden's (correlation {pearson:.2g})"],
        )


RULE = NeverLoaded()
