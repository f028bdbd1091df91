"""Choose: which two runs a bare ``job=compare`` means, and why a pair cannot be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerparity.compare.align import plan
from layerparity.compare.fingerprints import refuse_strangers
from layerparity.compare.parity import open_side
from layerparity.compare.stored import RunLike
from layerparity.errors import UserError

RunSet = Sequence[RunLike]


def obstacle(golden: RunSet, candidate: RunSet) -> str:
    """Return why two sides cannot be compared, or an empty string; reads manifests only."""
    try:
        left, right = open_side("golden", golden), open_side("candidate", candidate)
        refuse_strangers(left, right)
        plan(left, right)
    except UserError as error:
        return str(error)
    return ""


def newest_pair(
    goldens: Iterable[RunSet], candidates: Sequence[RunSet]
) -> tuple[RunSet, RunSet, list[str]]:
    """Return the newest golden, the newest candidate that fits it, and what was passed over.

    Both come newest first. Raises UserError with the newest pair's obstacle where none fits.
    """
    passed: list[str] = []
    for golden in goldens:
        for candidate in candidates:
            against = obstacle(golden, candidate)
            if not against:
                return golden, candidate, passed
            passed.append(f"{_name(candidate)} does not fit {_name(golden)}: {against}")
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
    first = f"{runs[0].name} ({runs[0].id[:8]})"
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"
