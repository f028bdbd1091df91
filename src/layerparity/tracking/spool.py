"""Spool: the folders of runs for a server: whole ones wait for it, the others go with their run."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest, write_text, writing
from layerparity.machine import owner
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.stored_run import FINISHED, MANIFEST_TAG, RUNNING
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import artifacts, interrupted, names

if TYPE_CHECKING:
    from mlflow.entities import Run

    from layerparity.tracking.connection import Connection

_FOLDER = "spool"
_LOCK = ".lock"
# Holds the address of the server that a run is for; hidden, so it is not uploaded.
_SERVER = ".server"
_ID = re.compile(r"[0-9a-f]{32}")
_UNKNOWN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def make_folder(config: TrackingConfig, run_id: str) -> Path:
    """Make the folder of a run for a server; return it. Raises UserError where the disk refuses."""
    folder = config.root / _FOLDER / run_id
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = _aside(folder)
        # No other server is ever asked about the run, or given it.
        write_text(aside / _SERVER, config.address)
        aside.chmod(0o755)
        aside.rename(folder)
    return folder


def remove(folder: Path) -> None:
    """Remove a run's folder; a process that is killed on the way leaves it to `settle`."""
    aside = folder
    with suppress(OSError):
        aside = _aside(folder)
        folder.rename(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _aside(folder: Path) -> Path:
    """Return a new folder beside a run's that says in its name which process it belongs to."""
    return Path(tempfile.mkdtemp(prefix=owner.prefix(_FOLDER), dir=folder.parent))


def waiting(config: TrackingConfig) -> dict[str, list[Path]]:
    """Return the folders of whole runs that were not uploaded, by the address of their server."""
    found: dict[str, list[Path]] = {}
    for folder in _folders(config):
        if RunFolder(folder).is_run:
            found.setdefault(_server_of(folder), []).append(folder)
    return found


def failure(error: UserError, folder: Path) -> UserError:
    """Return what is said where a server failed: where a whole run waits, and what uploads it."""
    if not RunFolder(folder).is_run:
        return error
    return UserError(
        f"{error.found or str(error).rstrip('.')}; the run is whole and waits in {folder}",
        "start the server, and the next command with it uploads the run, or job=sync does.",
    )


def settle(link: Connection) -> None:
    """Upload the whole runs that wait for this server, and remove the folders of those that ended.

    What another process settles now, and the run of a process that may be alive, is left alone.
    """
    from mlflow.exceptions import MlflowException

    config = link.config
    owner.remove_abandoned(config.root / _FOLDER)
    ours = [folder for folder in _folders(config) if _server_of(folder) == config.address]
    if not ours:
        return
    # Not every file system has locks, and two must not upload and remove one folder at once.
    with (
        suppress(Timeout, OSError, NotImplementedError),
        FileLock(config.root / _FOLDER / _LOCK, timeout=0),
    ):
        for folder in ours:
            try:
                run = _known(link, folder.name)
                if run is not None:
                    _settle(link, run, folder)
            except (UserError, MlflowException, OSError) as error:
                why = names.one_line(error)
                console.note(f"run {folder.name[:8]} was not uploaded, it waits in {folder}: {why}")


def _folders(config: TrackingConfig) -> list[Path]:
    return [
        folder
        for folder in sorted((config.root / _FOLDER).glob("*"))
        if _ID.fullmatch(folder.name) and (folder / _SERVER).is_file()
    ]


def _server_of(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return (folder / _SERVER).read_text(encoding="utf-8")
    return ""


def _known(link: Connection, run_id: str) -> Run | None:
    """Return the server's run; None where it knows none, as after its database was lost."""
    from mlflow.exceptions import MlflowException

    with link.user_errors():
        try:
            return link.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in _UNKNOWN:
                raise
            return None


def _settle(link: Connection, run: Run, folder: Path) -> None:
    prefix = names.PREFIX
    tags = {k.removeprefix(prefix): v for k, v in run.data.tags.items() if k.startswith(prefix)}
    closed = run.info.status != RUNNING and interrupted.TAG not in tags
    # Machines that share this folder may be asked: only that of the run sees whether it goes on.
    if not closed and not interrupted.owner_ended(tags):
        return
    deleted = run.info.lifecycle_stage == "deleted"
    if not deleted and run.info.status != FINISHED and RunFolder(folder).is_run:
        console.note(f"run {run.info.run_name} ({folder.name[:8]}) waited: it is uploaded now")
        _upload(link, folder, tags)
    remove(folder)


def _upload(link: Connection, folder: Path, tags: dict[str, str]) -> None:
    """Upload a whole run and make it FINISHED, as if its server had never gone away."""
    client, run_id = link.client, folder.name
    with link.user_errors():
        if MANIFEST_TAG not in tags:
            digest = text_digest((folder / MANIFEST).read_text(encoding="utf-8"))
            link.set_tags(run_id, {MANIFEST_TAG: digest})
        artifacts.upload(client, run_id, folder)
        client.set_terminated(run_id, FINISHED)
        for tag in (interrupted.TAG, "error"):
            if tag in tags:
                client.delete_tag(run_id, names.PREFIX + tag)
