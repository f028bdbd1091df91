"""decode_cache: what decoding reads from the cache is not what the prefill wrote."""

from __future__ import annotations

from layerparity.anatomy.site import DECODE
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
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
        reasons = [f"{evidence.local} fails at decode step {site.step} and passes in the prefill"]
        lost = _lost_rows(evidence)
        if lost:
            rows = ", ".join(map(str, lost[:8]))
            text = (
                f"the cache row of decode step {site.step} holds zeros (sequence {rows}): the new "
                "key was not written where it is read"
            )
            seen = [*reasons[:1], "the key is right before it goes into the cache"]
            return Cause("decode_cache", text, seen, grade=SHOWN)
        before = evidence.other_phase.get(evidence.local)
        passes = before is not None and before.outcome is Outcome.PASS
        if not passes or site.end not in ("k_rotated", "context"):
            return None
        return Cause("decode_cache", text, reasons, grade=SIGNS)


def _lost_rows(evidence: Evidence) -> list[int]:
    """Return the sequences whose newest key is read from the cache as zeros, and was none."""
    own = evidence.values(evidence.local) if evidence.local.endswith("k_rotated") else None
    if own is None or not evidence.good:
        return []
    gone = ~own.candidate.flatten(1).any(1) & own.golden.flatten(1).any(1)
    return [row for row, is_gone in enumerate(gone.tolist()) if is_gone]


RULE = DecodeCache()
