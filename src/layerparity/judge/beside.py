"""Hold a candidate's verdict beside that of another candidate of the same golden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerparity.judge.sides import open_side, open_sides, same_bytes
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict

# Keys that say which run it is, and not what it computes.
_NAMES = ("name", "golden", "tracking")


@dataclass(frozen=True)
class CandidatePair:
    """Two candidates that one golden judged, and what differs between them.

    ``changed`` holds by key what the other was asked for and what the candidate was; None where one
    was asked for nothing. Of the ``shared`` sites that both show, ``equal`` are equal to the bit.
    """

    candidate: Verdict
    other: Verdict
    changed: dict[str, tuple[Any, Any]]
    shared: int
    equal: int

    @property
    def blamed(self) -> bool:
        """Whether the candidate fails and the other passes: what differs between them did it."""
        return (self.other.outcome, self.candidate.outcome) == (Outcome.PASS, Outcome.FAIL)

    @property
    def same_place(self) -> bool:
        """Whether both go wrong first at one place."""
        places = {str(each.guilty) for each in (self.candidate, self.other)}
        return len(places) == 1


def held_beside(
    candidate: Verdict, runs: Sequence[StoredRun], other: Verdict, others: Sequence[StoredRun]
) -> CandidatePair:
    """Return two verdicts of one golden side by side; the runs are those of each candidate."""
    ours, theirs = (
        {k: v for k, v in each.candidate.made[0].settings.items() if k.split(".")[0] not in _NAMES}
        for each in (candidate, other)
    )
    changed = {
        key: (theirs.get(key), ours.get(key))
        for key in sorted({*ours, *theirs})
        if theirs.get(key) != ours.get(key)
    }
    # Of the tokens that both kept.
    fewer = open_side("candidate", runs).manifests[0].kept
    pair = open_sides(runs, others) if fewer else open_sides(others, runs)
    left, right = (each.records for each in pair)
    shared = left.keys() & right.keys()
    equal = sum(same_bytes(left[site], right[site]) for site in shared)
    return CandidatePair(candidate, other, changed, len(shared), equal)
