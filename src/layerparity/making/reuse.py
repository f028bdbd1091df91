"""Stored runs with the fingerprint of a new one: a finished one is reused, another one goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import inside
from layerparity.model.header import read_header
from layerparity.ports import port_loads
from layerparity.record.folder import INPUTS, MANIFEST, RunFolder
from layerparity.record.loaded import PortLoads
from layerparity.record.manifest import Manifest
from layerparity.settings.tracking import EMBEDDED, SERVER

if TYPE_CHECKING:
    from layerparity.record.progress import StoredProgress
    from layerparity.record.stored_run import StoredRun
    from layerparity.settings.config import Config
    from layerparity.tracking.active import ActiveRun
    from layerparity.tracking.store import Store

_LOCKS = "locks"


def can_go_on(config: Config) -> bool:
    """Say whether a run that is interrupted leaves what another process can go on from.

    Raises UserError where it leaves nothing, and resume=true was asked for.
    """
    remote, split = config.tracking.name == SERVER, config.tp_degree > 1
    if config.resume and remote:
        raise UserError(
            "resume=true: an interrupted run for a server leaves no files to go on from",
            "leave it out, or keep runs here with tracking=embedded.",
        )
    if config.resume and split:
        # The compiler decides how a cache lies on the devices; what is put back lies otherwise.
        raise UserError(
            f"resume=true: a run that is split over devices (tp_degree={config.tp_degree}) could "
            "not go on with the same bits",
            "leave it out.",
        )
    return not remote and not split


@contextmanager
def alone(config: Config, store: Store, fingerprint: str) -> Iterator[None]:
    """Hold the lock of a fingerprint while a run that may be reused, or resumed, is made.

    With reuse=true another command that holds it is waited for: its run can be taken. Otherwise
    raises UserError. A file system without locks has none.
    """
    if not (config.reuse or config.resume):
        yield
        return
    folder = store.config.root / _LOCKS
    lock = FileLock(folder / f"{fingerprint[:32]}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            if not config.reuse:
                raise UserError(
                    "Another command makes or resumes this very run (same fingerprint)",
                    "wait for it; with reuse=true this command waits, and takes its run.",
                ) from error
            console.note("another command makes this very run: it is waited for")
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        console.note(f"{folder} cannot be locked ({error}): others may make this very run, too")
    try:
        yield
    finally:
        lock.release()


def reusable(store: Store, fingerprint: str, own_port: bool = False) -> StoredRun | None:
    """Return the newest finished run with this fingerprint whose artifacts are whole, or None.

    With ``own_port`` what the user's port loaded must be as it was, too.

    Whole means: the manifest can be read, and every file that it lists is there, as long as its own
    header says, with the listed tensors. Bytes are not read; a comparison checks them. On a server
    only the manifest is looked at.
    """
    stored = store.by_fingerprint(fingerprint)
    if stored is None:
        return None
    try:
        manifest = stored.read_manifest()
        if stored.off:
            raise UserError(stored.off)
        if manifest.fingerprint != fingerprint:
            raise UserError(f"its {MANIFEST} is another run's")
        if store.config.name == EMBEDDED:
            _check_files(stored, manifest)
        if own_port:
            _check_loaded(stored.files.read_loaded())
    except UserError as error:
        console.note(f"run {stored.name} ({stored.id[:8]}) is not reused: {error}")
        return None
    return stored


def _check_files(run: Any, manifest: Manifest) -> None:
    listed: dict[str, set[tuple[str, tuple[int, ...]]]] = {INPUTS: set()}
    for record in manifest.records:
        listed.setdefault(record.file, set()).add((str(record.site), record.shape))
    for name, tensors in listed.items():
        path = inside(run.folder, name)
        if not path.is_file():
            raise UserError(f"{name} is gone.")
        present = {(each.name, each.shape) for each in read_header(path).tensors}
        lost = sorted(site for site, _ in tensors - present)
        if lost:
            raise UserError(f"{name} does not hold {lost[0]}.")


def _check_loaded(loaded: PortLoads | None) -> PortLoads:
    """Return what a user's port loaded. Raises UserError where it is no longer as it was."""
    if loaded is None:
        raise UserError("it does not say what its port loaded")
    differs = list(port_loads.changed(loaded))
    if differs:
        more = f" (and {len(differs) - 1} more)" if len(differs) > 1 else ""
        raise UserError(f"of what its port loaded, {differs[0]}{more}")
    return loaded


def covered(stored: StoredRun) -> str:
    """Say what of a user's port was looked at before its run was reused, and what was not."""
    loaded = stored.files.read_loaded()
    return f"What its port loaded is as it was: {loaded}. Not seen: {port_loads.NOT_SEEN}."


def resumable(
    store: Store, fingerprint: str, own_port: bool = False
) -> tuple[StoredRun, StoredProgress] | None:
    """Return the newest unfinished run with this fingerprint that can go on, and what it noted.

    Every file that it wrote is held against its hash, and with ``own_port`` what the user's port
    loaded until then against what is there now. Says why a run cannot go on, and where none
    can, that the run begins anew.
    """
    from layerparity.making.journal import circumstances
    from layerparity.record.progress import has_progress, read_progress

    for stored in store.unfinished(fingerprint):
        try:
            if not has_progress(store.own_folder(stored)):
                raise UserError("it left nothing to go on from")
            progress = read_progress(stored.folder)
            if progress.circumstances != circumstances(fingerprint):
                raise UserError("it was computed on another processor, or with other threads")
            progress.check()
            if own_port:
                port_loads.take(_check_loaded(RunFolder(stored.folder).read_loaded()))
            return stored, progress
        except UserError as error:
            console.note(f"run {stored.name} ({stored.id[:8]}) is not resumed: {error}")
    console.note("no interrupted run of this fingerprint can go on: the run begins anew")
    return None


def go_on(active: ActiveRun, stored: StoredRun, progress: StoredProgress) -> StoredProgress:
    """Let a run take over the files of an interrupted one; return its progress, where it is now.

    Raises UserError where another command was quicker.
    """
    active.take_over(stored, progress.folder)
    console.say(f"Resuming run {stored.name} ({stored.id}) after {progress.stages[-1].name}.")
    return replace(progress, folder=active.folder)
