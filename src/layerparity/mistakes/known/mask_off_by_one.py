"""mask_off_by_one: the causal mask shows one token too many, or hides one."""

from __future__ import annotations

from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.shape import trend


class MaskOffByOne:
    """Attention fails on good q, k and v; the error is largest where few tokens are seen."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the context's error falls with the position."""
        if evidence.part != "attention core" or len(evidence.errors) < 4:
            return None
        if len(evidence.tokens.position) != len(evidence.errors):
            return None
        falling = trend(evidence.errors, evidence.tokens.position)
        if falling > -0.4:
            return None
        text = "the causal mask is off by one: a token sees the next one, or not itself"
        return Cause(
            "mask_off_by_one",
            0.75,
            text,
            [
                "queries, keys and values pass and the attention made of them fails",
                f"early tokens, which see few others, are worst (rank correlation {falling:.2f})",
            ],
        )


RULE = MaskOffByOne()
