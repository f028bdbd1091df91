"""Choose: which two runs a bare ``job=compare`` means, and why a pair cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.ground.errors import UserError
from layerparity.judge.align import plan
from layerparity.judge.fingerprints import refuse_strangers
from layerparity.judge.parity import open_side
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome

RunSet = Sequence[StoredRun]


def obstacle(golden: RunSet, candidate: RunSet, in_full: bool) -> str:
    """Return why two sides cannot be compared, or an empty string; reads manifests only.

    ``in_full`` also asks that the golden ran all that the candidate ran.
    """
    try:
        left, right = open_side("golden", golden), open_side("candidate", candidate)
        refuse_strangers(left, right)
        planned = plan(left, right)
    except UserError as error:
        return str(error)
    short = [row for row in planned.settled if row.outcome is Outcome.INCONCLUSIVE]
    return f"{short[0].site}: {short[0].reason}" if short and in_full else ""


def newest_pair(
    goldens: Sequence[RunSet], candidates: Sequence[RunSet]
) -> tuple[RunSet, RunSet, list[str]]:
    """Return a golden, the newest candidate that fits one, and the pairs that were passed over.

    Both come newest first. A golden that covers the whole candidate is preferred to a newer one
    that does not. Raises UserError with the newest pair's obstacle where none fits.
    """
    passed: list[str] = []
    for candidate in candidates:
        for in_full in (True, False):
            for golden in goldens:
                against = obstacle(golden, candidate, in_full)
                if not against:
                    return golden, candidate, passed
                if in_full:
                    pair = f"{_name(candidate)} does not fit {_name(golden)}"
                    passed.append(f"{pair}: {against}")
    if not candidates:
        raise UserError(
            "There is no finished candidate run to compare: make one "
            "(python run.py backend=neuron), or give candidate=<run>."
        )
    raise UserError(
        passed[0]
        if passed
        else "There is no finished golden run to compare with: make one "
        "(python run.py backend=gpu device_map=cpu), or give golden=<run>."
    )


def _name(runs: RunSet) -> str:
    first = f"{runs[0].name} ({runs[0].id[:8] or runs[0].folder})"
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"
