"""gqa_layout: query heads read the keys and values of another group."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import outliers


class GqaLayout:
    """Whole groups of query heads are wrong: those that share a key and value head."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the context fails in some heads, on good q, k and v."""
        if evidence.part != "attention core":
            return None
        slopes = evidence.profile("head")
        heads, groups = evidence.fact("num_attention_heads"), evidence.fact("num_key_value_heads")
        if len(slopes) != heads or not 1 < groups < heads:
            return None
        wrong = outliers(slopes)
        size = heads // groups
        touched = sorted({head // size for head in wrong})
        whole = len(wrong) == size * len(touched)
        if not wrong or (len(wrong) < heads and not whole and len(wrong) < size):
            return None
        sure = 0.85 if whole and len(wrong) < heads else 0.6
        text = "query heads attend to the wrong key and value head: the GQA layout is another"
        named = ", ".join([*map(str, wrong[:8]), *(["..."] if len(wrong) > 8 else [])])
        reasons = [
            "queries, keys and values pass and the attention made of them fails",
            f"heads {named} of {heads} are wrong; {size} share a key and value head",
        ]
        return Cause("gqa_layout", sure, text, reasons)


RULE = GqaLayout()
