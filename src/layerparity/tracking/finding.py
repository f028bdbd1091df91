"""What a user's words for a run mean: an id, a name, ``latest`` or a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import UserError, nearest
from layerparity.tracking.names import PREFIX
from layerparity.tracking.stored import FINISHED, StoredRun, from_folder

if TYPE_CHECKING:
    from layerparity.tracking.store import Store


LATEST = "latest"
_ID = re.compile(r"[0-9a-f]{4,32}")
_NAMED = 4
_SWEEP = "sweep"
# How many runs are looked at where the newest ones are all some job's own.
_MANY = 1000
_HOW_TO_LIST = "'python run.py job=ui' shows all runs"


def find(store: Store, reference: str, kind: str | None) -> list[StoredRun]:
    """Return what `Store.find` promises."""
    if _is_path(reference):
        path = Path(reference).expanduser()
        # A sweep that was given no name is called by its command, which may hold a path.
        named = None if path.exists() else _by_name(store, reference, kind)
        return [_folder(path)] if named is None else expand(store, named, kind)
    here = Path(reference).is_dir()
    if reference == LATEST:
        runs = _latest(store, kind)
    else:
        found = _by_id(store, reference) or _by_name(store, reference, kind)
        if found is None and here:
            return [_folder(Path(reference))]
        if found is None:
            raise _not_found(store, reference)
        runs = expand(store, found, kind)
    if here:
        console.note(f"'{reference}' is taken as the run; the folder here is ./{reference}")
    return runs


def expand(store: Store, run: StoredRun, kind: str | None) -> list[StoredRun]:
    """Return a run as a set: a sweep is its finished children, those of ``kind`` if it has any.

    The sweep stands as their parent, also of those that it only reused. Raises UserError for a
    sweep of which nothing finished.
    """
    if run.kind != _SWEEP:
        return [run]
    children = store.children(run.id)
    finished = [replace(child, parent=run.id) for child in children if child.finished]
    if not finished:
        raise UserError(
            f"None of the {len(children)} runs of the sweep '{run.name}' finished: run it again."
        )
    return [child for child in finished if child.kind == kind] or finished


def own(store: Store, clauses: Sequence[str], limit: int) -> list[StoredRun]:
    """Return runs that satisfy every clause, newest first, but those that a job made for itself.

    A job such as a bisection makes runs under its own, which is no sweep. A run whose sweep was
    deleted stands for itself.
    """
    for looked_at in (2 * limit, max(_MANY, 2 * limit)):
        found = store.search(clauses, looked_at)
        above = {run.parent for run in found if run.parent}
        known = store.search([any_id(sorted(above))], len(above)) if above else []
        kinds = {parent.id: parent.kind for parent in known}
        kept = [run for run in found if kinds.get(run.parent or "", _SWEEP) == _SWEEP]
        if len(kept) >= limit or len(found) < looked_at:
            break
    return [run if run.parent in kinds else replace(run, parent=None) for run in kept[:limit]]


def _latest(store: Store, kind: str | None) -> list[StoredRun]:
    clauses = [status_is(FINISHED)]
    if kind:
        clauses.append(tag_is("kind", kind))
    found = own(store, clauses, limit=1)
    if not found:
        raise _not_found(store, LATEST, kind)
    parent = store.get(found[0].parent) if found[0].parent else None
    return expand(store, _later_sweep(store, found[0], kind) or parent or found[0], kind)


def _later_sweep(store: Store, run: StoredRun, kind: str | None) -> StoredRun | None:
    """Return the newest sweep of a kind that began after a run: all its parts were reused."""
    clauses = [tag_is("kind", _SWEEP), tag_is("holds", kind or "")]
    swept = store.search(clauses, limit=1) if kind else []
    later = [each for each in swept if each.start_time > run.start_time]
    return next((each for each in later if "children.finished" in each.tags), None)


def _is_path(reference: str) -> bool:
    return "/" in reference or reference.startswith((".", "~"))


def _folder(path: Path) -> StoredRun:
    if not path.exists():
        raise UserError(f"There is no folder {path}: give a run's id, its name, or a folder.")
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the folder that holds it.")
    return from_folder(path.resolve())


def _by_id(store: Store, reference: str) -> StoredRun | None:
    if not _ID.fullmatch(reference):
        return None
    found = store.search([id_starts(reference)], limit=2)
    if len(found) > 1:
        both = " and ".join(f"{run.id} ({run.name})" for run in found)
        raise UserError(f"'{reference}' begins the ids {both}: give more of it.")
    return found[0] if found else None


def _by_name(store: Store, reference: str, kind: str | None) -> StoredRun | None:
    """Return the newest run so called, one of the asked kind (or a sweep) before any other."""
    clause = equals("attributes.run_name", reference)
    named = [run for run in store.search([clause], limit=50) if run.name == reference]
    of_kind = (run for run in named if run.kind in (kind, _SWEEP))
    return next(of_kind, None) or next(iter(named), None)


def _not_found(store: Store, reference: str, kind: str | None = None) -> UserError:
    recent = store.runs(limit=100)
    place = store.config.place
    if not recent:
        return UserError(
            f"There are no runs in {place}: make a golden first: "
            "python run.py backend=gpu scope=full device_map=cpu"
        )
    if reference == LATEST:
        wanted = f"{kind} run" if kind else "run"
        return UserError(f"There is no finished {wanted} in {place}; {_HOW_TO_LIST}.")
    known = list(dict.fromkeys(run.name for run in recent))
    newest = ", ".join(f"'{name}'" for name in known[:_NAMED])
    return UserError(
        f"There is no run '{reference}' in {place}.{nearest(reference, known)} "
        f"Newest: {newest}; {_HOW_TO_LIST}."
    )


# Quotes and backslashes cannot be escaped in this language; % and _ are wildcards of LIKE.
_AWKWARD = re.compile(r"['\"\\\n\r;]")


def equals(field: str, value: str) -> str:
    """Return a clause for ``field`` being ``value``; an awkward character matches any one."""
    if not _AWKWARD.search(value):
        return f"{field} = '{value}'"
    return f"{field} LIKE '{_AWKWARD.sub('_', value)}'"


def tag_is(name: str, value: str) -> str:
    """Return a clause for one of our tags, named without its prefix."""
    return equals(f"tags.`{PREFIX}{name}`", value)


def id_starts(prefix: str) -> str:
    """Return a clause for run ids that begin with hexadecimal digits."""
    return f"attributes.run_id LIKE '{prefix}%'"


def status_is(status: str) -> str:
    """Return a clause for MLflow's own status."""
    return f"attributes.status = '{status}'"


def any_id(run_ids: list[str]) -> str:
    """Return a clause for one of several run ids."""
    return f"attributes.run_id IN ({', '.join(repr(each) for each in run_ids)})"
