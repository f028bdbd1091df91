"""one_expert: a single expert is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import expert_alone
from layerparity.mistakes.cause import HINTS, SHOWN, Cause, Evidence
from layerparity.mistakes.shape import lone


class OneExpert:
    """The tokens of one expert are wrong, all of them and no others; or its slope is alone."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one expert is wrong and all others are right."""
        if evidence.component not in ("mlp.experts", "mlp"):
            return None
        shown = expert_alone(evidence)
        blind = evidence.values(evidence.local) is None
        seen = shown or (lone(evidence, "expert") if blind else None)
        if seen is None:
            return None
        which, reasons = seen
        text = f"one expert is wrong{which}: its weights come from elsewhere, or a shard lost it"
        return Cause("one_expert", 0.75, text, reasons, grade=SHOWN if shown else HINTS)


RULE = OneExpert()
