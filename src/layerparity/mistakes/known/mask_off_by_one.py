"""mask_off_by_one: the causal mask shows one token too many, or hides one."""

from __future__ import annotations

from layerparity.anatomy.block import ATTENTION_CORE
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.kernels import core_of, hiding_first, stretched, who_sees
from layerparity.mistakes.shape import trend

_FAILS = "queries, keys and values pass and the attention made of them fails"
_WAYS = {1: "each token sees the next one", -1: "each token sees those before it, not itself"}


class MaskOffByOne:
    """A mask that shows one token more, or one less, gives the candidate's context."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the context is that of a mask off by one."""
        if evidence.part != ATTENTION_CORE:
            return None
        core = core_of(evidence)
        if core is None:
            return _by_trend(evidence)
        for ahead, words in _WAYS.items():
            seen = who_sees(evidence.tokens, ahead)
            if core.shows(seen) or core.shows(hiding_first(seen, evidence.tokens)):
                text = f"the causal mask is off by one: {words}"
                reasons = [_FAILS, "attention by such a mask gives its numbers to rounding"]
                return Cause("mask_off_by_one", text, reasons, grade=SHOWN)
        return None


def _by_trend(evidence: Evidence) -> Cause | None:
    """Return the cause where the context's error falls with the position."""
    if len(evidence.errors) < 4 or len(evidence.tokens.position) != len(evidence.errors):
        return None
    own = evidence.values(evidence.local)
    if own is not None and stretched(own) is not None:
        # Tokens that are weighed among each other as they should be are the right ones.
        return None
    falling = trend(evidence.errors, evidence.tokens.position)
    if falling > -0.4:
        return None
    text = "the causal mask is off by one: a token sees the next one, or not itself"
    worst = f"early tokens, which see few others, are worst (rank correlation {falling:.2f})"
    return Cause("mask_off_by_one", text, [_FAILS, worst], grade=SIGNS)


RULE = MaskOffByOne()
