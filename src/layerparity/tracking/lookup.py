"""Look up a run by a user's words: an id or its beginning, a name, ``latest``, or a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import UserError, nearest
from layerparity.ground.files import expanded, is_there
from layerparity.ground.program import program
from layerparity.record.exported import ZIP, is_export
from layerparity.record.stored_run import FINISHED, StoredRun, from_folder
from layerparity.settings.config import LATEST
from layerparity.settings.tracking import EMBEDDED, TrackingConfig
from layerparity.tracking import database
from layerparity.tracking.exports import open_export
from layerparity.tracking.stored_runs import (
    SWEEP,
    StoredRuns,
    equals,
    id_starts,
    status_is,
    tag_is,
)

_ID = re.compile(r"[0-9a-f]{4,32}")
_SHOWN_NAMES = 4
_LOOKED_AT = 50


def is_made(config: TrackingConfig) -> bool:
    """Say whether the store is there; of a server that is not known before it is asked."""
    return config.name != EMBEDDED or (config.root / database.FILE_NAME).exists()


def refuse_absent(config: TrackingConfig, references: Iterable[str | None]) -> None:
    """Raise UserError for what no store can hold, before one is made to look it up.

    That is a path where nothing is, and, as the store is not there yet, a name or an id.
    """
    if is_made(config):
        return
    for each in references:
        if each is None:
            continue
        path = expanded(each)
        if "/" in each or each.startswith((".", "~")):
            _refuse_nothing_at(path)
        elif not is_there(path):
            raise _no_runs(config)


def _refuse_nothing_at(path: Path) -> None:
    if not is_there(path):
        raise UserError(f"There is no folder {path}", "give a run's id, its name, or a folder.")


def look_up(stored: StoredRuns, reference: str, kind: str | None) -> list[StoredRun]:
    """Return what `Store.find` promises."""
    if "/" in reference or reference.startswith((".", "~")):
        path = expanded(reference)
        # A sweep that was given no name is called by its command, which may hold a path.
        run = None if is_there(path) else _by_name(stored, reference, kind)
        return _outside(stored, path, kind) if run is None else expand(stored, run, kind)
    there = is_there(Path(reference))
    here = (there and Path(reference).is_dir()) or reference.endswith(ZIP)
    if reference == LATEST:
        runs = _latest(stored, kind)
    else:
        run = _by_id(stored, reference) or _by_name(stored, reference, kind)
        if run is None and here:
            return _outside(stored, Path(reference), kind)
        if run is None:
            raise _not_found(stored, reference)
        runs = expand(stored, run, kind)
    if here and there:
        console.note(f"'{reference}' is taken as the run; the folder here is ./{reference}")
    return runs


def expand(stored: StoredRuns, run: StoredRun, kind: str | None) -> list[StoredRun]:
    """Return a run as a set: a sweep is its finished children, those of ``kind`` if it has any.

    The sweep stands as their parent, also of those that it only reused. Raises UserError for a
    sweep of which nothing finished.
    """
    if run.kind != SWEEP:
        return [run]
    children = stored.children(run.id)
    finished = [replace(child, parent=run.id) for child in children if child.finished]
    if not finished:
        raise UserError(
            f"None of the {len(children)} runs of the sweep '{run.name}' finished", "run it again."
        )
    return [child for child in finished if child.kind == kind] or finished


def _latest(stored: StoredRuns, kind: str | None) -> list[StoredRun]:
    of_kind = [tag_is("kind", kind)] if kind else []
    # A golden that cannot be believed is nobody's latest, nor one of a port beside transformers'.
    golden = kind == "golden"
    # Mostly the newest is the one: MLflow takes long over each further run that it reads.
    top = stored.own(of_kind, limit=1)
    trusted = [run for run in top if not golden or (run.by_transformers and not run.off)]
    finished = [run for run in trusted if run.finished]
    if not finished:
        finished = stored.own([status_is(FINISHED), *of_kind], limit=_LOOKED_AT if golden else 1)
    sound = [run for run in finished if run.parent or not run.off]
    newest = [run for run in sound if run.by_transformers][:1] if golden else sound
    newest = newest or sound[:1]
    if not newest:
        raise _not_found(stored, LATEST, kind)
    (run,) = newest
    for each in top if kind else []:
        if each.order > run.order and not each.finished:
            console.note(f"{each.name} ({each.id[:8]}) is newer, and passed over: {each.status}")
    for each in finished[: finished.index(run)]:
        why = each.off or f"port {each.tags.get('port')} computed it, and not transformers (hf)"
        console.note(f"{each.name} ({each.id[:8]}) is passed over: {why}")
    # A newer sweep of this kind may have made no run, because all its parts were reused.
    holds = [tag_is("kind", SWEEP), tag_is("holds", kind or "")]
    for sweep in stored.search(holds, limit=1) if kind else []:
        if sweep.order > run.order and "children.finished" in sweep.tags:
            return expand(stored, sweep, kind)
    parent = stored.get(run.parent) if run.parent else None
    return expand(stored, parent or run, kind)


def _outside(stored: StoredRuns, path: Path, kind: str | None) -> list[StoredRun]:
    """Return the runs that an export outside the store holds, or the one that a folder is."""
    _refuse_nothing_at(path)
    if is_export(path):
        return open_export(path.resolve(), stored.config, kind)
    if not path.is_dir():
        raise UserError(f"{path} is a file", "give the folder that holds it.")
    return [from_folder(path.resolve())]


def _by_id(stored: StoredRuns, reference: str) -> StoredRun | None:
    if not _ID.fullmatch(reference):
        return None
    runs = stored.search([id_starts(reference)], limit=2)
    if len(runs) > 1:
        both = " and ".join(f"{run.id} ({run.name})" for run in runs)
        raise UserError(f"'{reference}' begins the ids {both}", "give more of it.")
    return runs[0] if runs else None


def _by_name(stored: StoredRuns, reference: str, kind: str | None) -> StoredRun | None:
    """Return the newest run so called, one of the asked kind (or a sweep) before any other."""
    clause = equals("attributes.run_name", reference)
    runs = [run for run in stored.search([clause], limit=50) if run.name == reference]
    of_kind = (run for run in runs if run.kind in (kind, SWEEP))
    return next(of_kind, None) or next(iter(runs), None)


def _not_found(stored: StoredRuns, reference: str, kind: str | None = None) -> UserError:
    recent = stored.runs(limit=100)
    place = stored.config.place
    if not recent:
        return _no_runs(stored.config)
    if reference == LATEST:
        wanted = f"{kind} run" if kind else "run"
        return UserError(
            f"There is no finished {wanted} in {place}; {_how_to_list(stored.config)}."
        )
    known = list(dict.fromkeys(run.name for run in recent))
    newest = ", ".join(f"'{name}'" for name in known[:_SHOWN_NAMES])
    return UserError(
        f"There is no run '{reference}' in {place}.{nearest(reference, known)} "
        f"Newest: {newest}; {_how_to_list(stored.config)}."
    )


def _how_to_list(config: TrackingConfig) -> str:
    return f"'{' '.join([program(), 'job=ui', *config.words])}' shows all runs"


def _no_runs(config: TrackingConfig) -> UserError:
    command = [f"{program()} backend=gpu scope=full device_map=cpu", *config.words]
    return UserError(
        f"There are no runs in {config.place}: make a golden first: {' '.join(command)}"
    )
