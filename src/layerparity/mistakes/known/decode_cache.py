"""decode_cache: what decoding reads from the cache is not what the prefill wrote."""

from __future__ import annotations

from layerparity.anatomy.site import DECODE, Site
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.record.verdict import Outcome

_QUERIES = "self_attn:q_rotated"
# The port that shows keys out of its cache, where a prefill attends those that it has just made.
_READS_CACHE = "vllm_neuron"


class DecodeCache:
    """Keys or attention pass in the prefill and fail in a decode step, or keys alone fail."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only decoding, or only what is cached, shows what is wrong."""
        site = evidence.site
        if site is None or site.path.rpartition(".")[2] != "self_attn":
            return None
        # Queries never go through a cache.
        if evidence.failed(_QUERIES):
            return None
        return _read_wrong(evidence, site) if site.phase == DECODE else _written_wrong(evidence)


def _read_wrong(evidence: Evidence, site: Site) -> Cause | None:
    """Return the cause where a decode step alone shows wrong keys or attention."""
    text = "the cache is read or written at the wrong place, or its mask shows empty slots"
    reasons = [f"{evidence.local} fails at decode step {site.step} and passes in the prefill"]
    lost = _lost_rows(evidence)
    if lost:
        rows = ", ".join(map(str, lost[:8]))
        text = (
            f"the cache row of decode step {site.step} holds zeros (sequence {rows}): the new key "
            "was not written where it is read"
        )
        seen = [*reasons, "the key is right before it goes into the cache"]
        return Cause("decode_cache", text, seen, grade=SHOWN)
    before = evidence.other_phase.get(evidence.local)
    passes = before is not None and before.outcome is Outcome.PASS
    # Keys that were rotated by a wrong position are no less wrong: queries tell.
    told = site.end == "context" or (site.end == "k_rotated" and evidence.passed(_QUERIES))
    return Cause("decode_cache", text, reasons, grade=SIGNS) if passes and told else None


def _written_wrong(evidence: Evidence) -> Cause | None:
    """Return the cause where a prefill attends what is right, and caches something else."""
    if evidence.facts.get("port", "").partition(" ")[0] != _READS_CACHE:
        return None
    behind = [each for each in ("self_attn:context", "self_attn:out") if evidence.passed(each)]
    if not evidence.local.endswith("k_rotated") or not behind:
        return None
    text = (
        "the keys that are cached are not those that attention read: they were written to other "
        "slots, or something else was written over them"
    )
    return Cause("decode_cache", text, [f"{behind[0]} passes in the same pass"], grade=SIGNS)


def _lost_rows(evidence: Evidence) -> list[int]:
    """Return the sequences whose newest key is read from the cache as zeros, and was none."""
    own = evidence.values(evidence.local) if evidence.local.endswith("k_rotated") else None
    if own is None or not evidence.good:
        return []
    gone = ~own.candidate.flatten(1).any(1) & own.golden.flatten(1).any(1)
    return [row for row, is_gone in enumerate(gone.tolist()) if is_gone]


RULE = DecodeCache()
