"""Interrupted: the heartbeat of an open run, and the end of a run whose process is gone."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.machine.owner import has_ended
from layerparity.record.stored_run import INTERRUPTED, KILLED, StoredRun
from layerparity.settings.tracking import EMBEDDED
from layerparity.tracking import database, names

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from layerparity.tracking.connection import Connection

# A run's tags: which process made it, when that was last heard of, that it was taken for dead.
OWNER = "owner"
BEAT = "heartbeat"
TAG = "interrupted"
BEAT_SECONDS = 60.0
DEADLINE_SECONDS = 15 * 60.0
# As `ground.files.whole_file` names what is not whole yet.
_PARTS = ".*.????????.part"
_SECONDS = re.compile(r"[0-9]{1,11}")
_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Tags a run with the time each minute, for those who cannot see its process."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._stop = threading.Event()

        def beat() -> None:
            while not self._stop.wait(BEAT_SECONDS):
                try:
                    client.set_tag(run_id, names.PREFIX + BEAT, now())
                except Exception as error:
                    # A server that is away for minutes must not cost a run that needs it later.
                    _LOG.debug("No heartbeat of %s: %s", run_id, error)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Tag no more; a request that is under way is not waited for."""
        self._stop.set()


def now() -> str:
    """Return the time as a heartbeat's tag holds it: whole seconds since 1970."""
    return str(int(time.time()))


def is_gone(tags: Mapping[str, str], started: datetime) -> bool:
    """Return whether the process of a run that MLflow believes to be running is gone.

    Of a process that cannot be seen from here, on another machine or in another container, nothing
    was heard for `DEADLINE_SECONDS`; a clock that far ahead says nothing either. Runs that are not
    ours never are.
    """
    ended = owner_ended(tags)
    if ended is None and OWNER in tags:
        return abs(time.time() - _last_beat(tags, started)) > DEADLINE_SECONDS
    return bool(ended)


def owner_ended(tags: Mapping[str, str]) -> bool | None:
    """Return whether the process that made a run ended; None where that is not seen from here."""
    owner = tags.get(OWNER, "")
    return has_ended(owner) if owner.count(":") >= 2 else None


def end_abandoned(link: Connection, runs: Iterable[StoredRun]) -> None:
    """End each interrupted one of these runs as KILLED, remove what it left half, and say so."""
    for run in runs:
        if run.status != INTERRUPTED:
            continue
        called = f"run {run.name} ({run.id[:8]})"
        seen = owner_ended(run.tags) is not None
        minutes = int(DEADLINE_SECONDS / 60)
        why = "its process is gone" if seen else f"nothing was heard of it for {minutes} minutes"
        try:
            link.set_tags(run.id, {TAG: "true", "error": f"interrupted: {why}"})
            with link.user_errors():
                last = int(_last_beat(run.tags, run.start_time) * 1000)
                link.client.set_terminated(run.id, KILLED, last)
        except UserError as error:
            console.note(f"{called} was interrupted and could not be marked so: {error}")
            continue
        _remove_halves(link, run)
        console.note(f"{called} was interrupted ({why}): it is marked so")


def unmark(link: Connection, run_id: str, *more: str) -> None:
    """Take the mark off a run that was taken for dead and went on, and ``more`` tags with it."""
    kept = link.client.get_run(run_id).data.tags
    if names.PREFIX + TAG in kept:
        for each in (names.PREFIX + tag for tag in (TAG, *more)):
            if each in kept:
                link.client.delete_tag(run_id, each)


def _last_beat(tags: Mapping[str, str], started: datetime) -> float:
    beat = tags.get(BEAT, "")
    # The clock may have been set right since the run began.
    return float(beat) if _SECONDS.fullmatch(beat) else started.timestamp()


def _remove_halves(link: Connection, run: StoredRun) -> None:
    """Remove the files that a run began and did not end; only below the store's own artifacts.

    Of a process that may be alive after all, those that nobody wrote to for long.
    """
    if link.config.name != EMBEDDED:
        return
    latest = time.time() - (0.0 if owner_ended(run.tags) else DEADLINE_SECONDS)
    # A folder that was moved away, or that another user owns, is not worth a command.
    with suppress(UserError, OSError):
        folder = run.folder.resolve()
        if folder.is_relative_to((link.config.root / database.ARTIFACTS).resolve()):
            for part in folder.rglob(_PARTS):
                if part.is_file() and part.stat().st_mtime <= latest:
                    part.unlink(missing_ok=True)
