"""Removal: take runs out of an embedded store, so that nothing left half ever looks whole.

MLflow first holds a run as deleted, then its folder is renamed aside, then removed. What a killed
process leaves on the way, the next removal finds.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure
from layerparity.machine import owner
from layerparity.record.exported import FILE, ZIP
from layerparity.record.stored_run import StoredRun
from layerparity.tracking import database, in_use
from layerparity.tracking.interrupted import DEADLINE_SECONDS
from layerparity.tracking.store import Store

_ASIDE = ".removed-"
# As `record.exported.write_export` names what is not whole yet.
_EXPORT = re.compile(r"\..+\.([0-9]{1,10})\.part")


def deleted_runs(store: Store) -> list[StoredRun]:
    """Return the runs that MLflow holds as deleted, and whose files are there."""
    artifacts = store.config.root / database.ARTIFACTS
    return [run for run in store.every(deleted=True) if (artifacts / run.id).is_dir()]


def leftovers(store: Store, here: Path) -> list[Path]:
    """Return what killed removals left in a store, and killed exports in the folder ``here``.

    An export is left where its process is gone from this machine and nobody wrote to it for long.
    """
    found = sorted((store.config.root / database.ARTIFACTS).glob(f"{_ASIDE}*"))
    for path in sorted(here.glob(".*.part")):
        named = _EXPORT.fullmatch(path.name)
        if named is None or path.is_symlink() or owner.start_of(int(named[1])):
            continue
        with suppress(OSError):
            inside = list(path.rglob("*")) if path.is_dir() else []
            if path.is_dir():
                ours = {each.name for each in path.iterdir()} <= {"runs", FILE}
            else:
                with path.open("rb") as file:
                    ours = f"{ZIP}." in path.name and file.read(2) in (b"PK", b"")
            newest = max(each.stat().st_mtime for each in (path, *inside))
            if ours and time.time() - newest > DEADLINE_SECONDS:
                found.append(path)
    return found


@contextmanager
def taken(store: Store, runs: Sequence[StoredRun]) -> Iterator[dict[str, str]]:
    """Take runs for this process alone; yield why others could not be, by their ids.

    Raises UserError where the store's file system has no locks.
    """
    root, refused, ours = store.config.root, {}, []
    try:
        for run in runs:
            try:
                own = in_use.take(root, run.id)
            except OSError as error:
                raise UserError(
                    f"{root / in_use.FILE_NAME} cannot be locked ({error.strerror}), so that runs "
                    "in use cannot be told",
                    f"{disk_cure(error)}, or move the store to a disk with locks.",
                ) from error
            if own:
                ours.append(run.id)
            else:
                refused[run.id] = "another command uses it"
        yield refused
    finally:
        for run_id in ours:
            in_use.release(root, run_id)


def remove(store: Store, runs: Sequence[StoredRun], said: Callable[[StoredRun], object]) -> None:
    """Remove runs that were `taken`; ``said`` is told each, before its files are removed.

    Every run is deleted for MLflow before any file goes, and a sweep before its parts, which then
    stand for themselves. Raises UserError where the disk refuses.
    """
    artifacts = store.config.root / database.ARTIFACTS
    known = {run.id for run in store.every()}
    # No run that stays names any of these: half of them may be gone.
    for run in sorted(runs, key=lambda run: run.parent is not None):
        if run.id in known:
            store.delete(run)
    for run in runs:
        said(run)
        folder = artifacts / run.id
        aside = folder.with_name(f"{_ASIDE}{run.id}-{secrets.token_hex(4)}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(
                f"{folder} cannot be removed ({error.strerror})",
                f"{disk_cure(error)}, and run the command again.",
            ) from error
        discard(aside)


def discard(path: Path) -> None:
    """Remove a file or a folder that is nobody's; another process may do so at the same time."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
