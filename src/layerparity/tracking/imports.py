"""Imports: runs of an export, taken into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from layerparity.ground.files import text_digest, writing
from layerparity.record.exported import KINDS, ExportedRun, ExportList, exported_runs, named_in
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.manifest import Manifest
from layerparity.record.stored_run import FINISHED, MANIFEST_TAG, StoredRun
from layerparity.tracking.exports import unpacked
from layerparity.tracking.store import Store
from layerparity.tracking.stored_runs import StoredRuns, status_is, tag_is

# Of a run that was imported: the id it has where it was made.
IMPORTED = "imported_from"
_LOCKS = "locks"
Points = Callable[[Manifest, RunFolder], Iterable[tuple[str, float, int]]]


@dataclass(frozen=True)
class ImportedRun:
    """A run of an export, as it is in the store; ``fresh`` unless it was there before."""

    run: StoredRun
    fresh: bool


def import_runs(store: Store, path: Path, points: Points) -> list[ImportedRun]:
    """Take the runs of an export into the store, goldens first; return them.

    Nothing is in the store before all files are unpacked and held against their hashes, and a run's
    manifest is the last file it gets. A run that is there already is not taken again. ``points``
    returns the metrics of a run. Raises UserError for an export that is not sound.
    """
    with unpacked(path, store.config.root) as (folder, listing), named_in(path, folder):
        first = sorted(listing.runs, key=lambda run: KINDS.index(run.tags["kind"]))
        runs = exported_runs(folder, ExportList(tuple(first)))
        return [_taken_once(store, *each, points) for each in zip(first, runs, strict=True)]


def _taken_once(store: Store, made: ExportedRun, run: StoredRun, points: Points) -> ImportedRun:
    """Take a run that no other command takes at the same time: that one is waited for."""
    with _alone(store.config.root / _LOCKS, made.id):
        there = known_as(store, made.id)
        if there is not None:
            return ImportedRun(there, fresh=False)
        return _taken(store, made, run, points)


@contextmanager
def _alone(folder: Path, run_id: str) -> Iterator[None]:
    lock = FileLock(folder / f"import-{run_id}.lock")
    # A file system without locks has none.
    with suppress(OSError, NotImplementedError):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _taken(store: Store, made: ExportedRun, run: StoredRun, points: Points) -> ImportedRun:
    manifest, files, tags = run.read_manifest(), run.files, {**run.tags, IMPORTED: made.id}
    fed = [known_as(store, each) for each in tags.get("inputs_from", "").split()]
    if any(fed):
        tags["inputs_from"] = " ".join(each.id for each in fed if each is not None)
    with store.start(run.name, run.kind, tags, files.read_config()) as active:
        active.log_metrics(points(manifest, files))
        for name in sorted(made.files, key=lambda name: (name == MANIFEST, name)):
            target = active.folder / name
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                (run.folder / name).replace(target)
        text = (active.folder / MANIFEST).read_text(encoding="utf-8")
        active.set_tags({MANIFEST_TAG: text_digest(text)})
    stored = store.get(active.id)
    assert stored is not None, "it was just made"
    return ImportedRun(stored, fresh=True)


def known_as(stored: StoredRuns, run_id: str) -> StoredRun | None:
    """Return the finished run with this id, or the one that was imported from it; None for none."""
    own = stored.get(run_id)
    if own is not None and own.finished:
        return own
    return next(iter(stored.search([tag_is(IMPORTED, run_id), status_is(FINISHED)], 1)), None)
