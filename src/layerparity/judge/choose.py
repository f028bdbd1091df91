"""Choose: which two runs a bare ``job=compare`` means, and why a pair cannot be compared.

Why is no sentence: `report/refusals.py` says it in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.blocks import Blocks
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.judge.align import align
from layerparity.judge.asked import Asked
from layerparity.judge.fingerprints import refuse_strangers
from layerparity.judge.sides import open_sides
from layerparity.record.findings import UnfinishedSweep
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row
from layerparity.settings.config import LATEST, Config, RunKind

if TYPE_CHECKING:
    from layerparity.tracking.store import Store

Runs = Sequence[StoredRun]
# How many runs of a kind are looked at.
LIMIT = 50
# What a run's tag ``inputs`` says of one that was fed a candidate's own values.
OWN = "candidate"


@dataclass(frozen=True)
class PassedOver:
    """A candidate that does not fit a golden, and why: an error, or the first site left open."""

    golden: Runs
    candidate: Runs
    obstacle: UserError | Row


class NoPairError(UserError):
    """No golden fits any candidate; ``newest`` is the pair of the newest two."""

    def __init__(self, newest: PassedOver) -> None:
        super().__init__("no golden run fits a candidate run")
        self.newest = newest


def obstacle(golden: Runs, candidate: Runs, in_full: bool) -> UserError | Row | None:
    """Return why two sides cannot be compared, or None; reads manifests only.

    ``in_full`` also asks that the golden ran all that the candidate ran: then it may be the first
    row that stays open.
    """
    try:
        left, right = open_sides(golden, candidate)
        refuse_strangers(left, right)
        aligned = align(left, right, Blocks())
    except UserError as error:
        return error
    short = [row for row in aligned.settled if row.outcome is Outcome.INCONCLUSIVE]
    return short[0] if short and in_full else None


def newest_pair(
    goldens: Sequence[Runs], candidates: Sequence[Runs]
) -> tuple[Runs, Runs, list[PassedOver]]:
    """Return a golden, the newest candidate that fits one, and the pairs that were passed over.

    Both come newest first. A golden by transformers is preferred to any other, one that covers the
    whole candidate to a newer one that does not, and of those one of the same model to a newer one
    of another. Raises NoPairError where none fits, and UserError where a side has no runs.
    """
    refused: list[PassedOver] = []
    for candidate in candidates:
        nearest_first = sorted(goldens, key=lambda each: _models(each) != _models(candidate))
        for by_transformers, in_full in product((True, False), repeat=2):
            for golden in nearest_first:
                if all(each.by_transformers for each in golden) is not by_transformers:
                    continue
                against = obstacle(golden, candidate, in_full)
                if against is None:
                    return golden, candidate, refused
                if in_full:
                    refused.append(PassedOver(golden, candidate, against))
    if not candidates:
        raise UserError(
            "There is no finished candidate run to compare: make one "
            f"({program()} backend=neuron), or give candidate=<run>."
        )
    if refused:
        raise NoPairError(refused[0])
    raise UserError(
        "There is no finished golden run to compare with: make one "
        f"({program()} backend=gpu device_map=cpu), or give golden=<run>."
    )


def _models(runs: Runs) -> set[str]:
    """Return what the models of a side are called; a block of another may have the same weights."""
    return {each.tags.get("model", "") for each in runs}


def chosen_sides(
    config: Config, store: Store, asked: Asked | None = None
) -> tuple[Runs, Runs, list[PassedOver]]:
    """Return the two sides that were asked for, or the newest that fit, and what was passed over.

    The candidate is one that is as ``asked``; the latest is the newest such. Raises as
    `newest_pair` does, and UserError where one that is named is not so.
    """
    sides = {
        kind: _find_side(store, reference, kind, names)
        for kind, reference, names in (
            (RunKind.golden, config.golden, getattr(config.job, "golden_names", None)),
            (RunKind.candidate, config.candidate, getattr(config.job, "candidate_names", None)),
        )
    }
    golden, candidate = sides[RunKind.golden], sides[RunKind.candidate]
    latest = config.candidate == LATEST and asked is not None and asked.says_something
    if latest:
        candidate = None
    if asked is not None and candidate is not None:
        candidate = asked.refuse(candidate, str(config.candidate))
    if golden is not None and candidate is not None:
        return golden, candidate, []
    goldens = [golden] if golden is not None else _finished_sets(store, RunKind.golden)
    candidates = [candidate] if candidate is not None else _finished_sets(store, RunKind.candidate)
    if asked is not None and candidate is None:
        every, candidates = candidates, []
        candidates += [fitting for each in every if (fitting := asked.fitting(each))]
        asked.refuse_none(candidates, every)
        candidates = candidates[:1] if latest else candidates
    if not goldens and not candidates:
        store.find(LATEST, RunKind.golden.value)
    return newest_pair(goldens, candidates)


def _find_side(
    store: Store, reference: str | None, kind: RunKind, names: str | None
) -> Runs | None:
    """Return the runs that ``reference`` names, a dump with its name map; None without one.

    Raises UserError where there is none, or where a run is to have a name map.
    """
    if reference is None:
        return None
    runs = store.find(reference, kind=kind.value)
    if not names:
        return runs
    if runs[0].id or runs[0].files.is_run:
        raise UserError(f"job.{kind.value}_names is for a folder of dumps; {reference} is a run.")
    return [replace(runs[0], names=Path(names).absolute())]


def _finished_sets(store: Store, kind: RunKind) -> list[Runs]:
    """Return the finished runs of a kind, newest first, each sweep as one set.

    Those that a job made for itself, such as a bisection, are named by their ids only; so are
    goldens that were fed a candidate's own values.
    """
    sets: list[Runs] = []
    sweeps: set[str] = set()
    for run in store.own_runs(kind.value, LIMIT):
        if not run.finished:
            if not sets:
                console.say(f"passed over: {run.name} ({run.id[:8]}) is {run.status}")
            continue
        if run.parent in sweeps or (kind is RunKind.golden and run.tags.get("inputs") == OWN):
            continue
        if run.parent is None:
            # One of a sweep's is passed over site by site.
            if run.off:
                console.say(f"passed over: {run.name} ({run.id[:8]}): {run.off}")
                continue
            sets.append([run])
            continue
        sweeps.add(run.parent)
        sets.append(store.find(run.parent, kind=kind.value))
    return sets


def unfinished_sweeps(store: Store, runs: Runs) -> list[UnfinishedSweep]:
    """Return which sweeps among the runs did not finish as a whole, and how they ended."""
    parents = {run.parent for run in runs if run.parent}
    sweeps = [store.get(parent) for parent in sorted(parents)]
    return [
        UnfinishedSweep(each.name, each.status)
        for each in sweeps
        if each is not None and each.kind == "sweep" and not each.finished
    ]
