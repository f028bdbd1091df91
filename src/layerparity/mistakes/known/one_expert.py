"""one_expert: a single expert is wrong."""

from __future__ import annotations

from layerparity.mistakes.alone import expert_alone
from layerparity.mistakes.cause import SHOWN, Cause, Evidence


class OneExpert:
    """The tokens of one expert are wrong, all of them and no others."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where one expert is wrong and all others are right."""
        if evidence.component not in ("mlp.experts", "mlp"):
            return None
        seen = expert_alone(evidence)
        if seen is None:
            return None
        which, reasons = seen
        text = f"one expert is wrong{which}: its weights come from elsewhere, or a shard lost it"
        return Cause("one_expert", text, reasons, grade=SHOWN)


RULE = OneExpert()
