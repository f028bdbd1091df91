"""decode_cache: what decoding reads from the cache is not what the prefill wrote."""

from __future__ import annotations

from layerparity.anatomy.site import DECODE
from layerparity.mistakes.cause import HINTS, SIGNS, Cause, Evidence
from layerparity.record.verdict import Outcome


class DecodeCache:
    """Keys or attention pass in the prefill and fail in a decode step."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only decoding shows wrong keys or attention."""
        site = evidence.site
        if site is None or site.phase != DECODE or site.path.rpartition(".")[2] != "self_attn":
            return None
        if evidence.failed("self_attn:q_rotated"):
            # Queries never go through a cache.
            return None
        text = "the cache is read or written at the wrong place, or its mask shows empty slots"
        sure = 0.8 if site.end in ("k_rotated", "context") else 0.55
        reasons = [f"{evidence.local} fails at decode step {site.step} and passes in the prefill"]
        before = evidence.other_phase.get(evidence.local)
        passes = before is not None and before.outcome is Outcome.PASS
        grade = SIGNS if sure > 0.6 else HINTS
        return Cause("decode_cache", sure, text, reasons, grade=grade) if passes else None


RULE = DecodeCache()
