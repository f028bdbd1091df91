"""StoredRun: a run that was kept, and where its artifacts lie."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.record.manifest import FILE_NAME, Manifest
from layerparity.tracking.names import PARENT_TAG, PREFIX

if TYPE_CHECKING:
    from mlflow.entities import Run


FINISHED = "FINISHED"
FAILED = "FAILED"
KILLED = "KILLED"
RUNNING = "RUNNING"
INTERRUPTED = "INTERRUPTED"


@dataclass(frozen=True)
class StoredRun:
    """A kept run; ``tags`` are ours, without their prefix; ``id`` is empty for a bare folder.

    ``parent`` is the sweep it was made by, or found as a part of. ``names`` is a dump's name map,
    where it is not in the dump's folder.
    ``status`` is MLflow's (RUNNING, FINISHED, FAILED, KILLED), or INTERRUPTED for a run that MLflow
    believes to be running while its process on this machine is gone.
    """

    id: str
    name: str
    status: str
    tags: dict[str, str]
    start_time: datetime
    url: str = ""
    parent: str | None = None
    names: Path | None = None
    locate: Callable[[str], Path] = field(default=Path, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """golden, candidate, comparison, sweep, ...; empty for a bare folder without a manifest."""
        return self.tags.get("kind", "")

    @property
    def folder(self) -> Path:
        """The artifacts: in place where they are local, else downloaded once into the cache."""
        return self.locate("")

    def file(self, path: str) -> Path:
        """Return where one file of the artifacts lies; from a server only that file is fetched."""
        return self.locate(path)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.status == FINISHED


def from_mlflow(run: Run, url: str, locate: Callable[[str], Path]) -> StoredRun:
    """Return MLflow's run as ours."""
    tags = {k.removeprefix(PREFIX): v for k, v in run.data.tags.items() if k.startswith(PREFIX)}
    return StoredRun(
        id=run.info.run_id,
        name=run.info.run_name or "",
        status=_status(run.info.status, tags.get("owner", "")),
        tags=tags,
        start_time=datetime.fromtimestamp(run.info.start_time / 1000, tz=UTC),
        url=url,
        parent=run.data.tags.get(PARENT_TAG),
        locate=locate,
    )


def from_folder(folder: Path) -> StoredRun:
    """Return a folder of artifacts that is in no store; its manifest, if any, names the kind."""
    manifest = Manifest.read(folder) if (folder / FILE_NAME).is_file() else None
    return StoredRun(
        id="",
        name=folder.name,
        status=FINISHED,
        tags=_tags(manifest) if manifest else {},
        start_time=datetime.fromtimestamp(folder.stat().st_mtime, tz=UTC),
        locate=lambda path: folder / path,
    )


def _tags(manifest: Manifest) -> dict[str, str]:
    named = ("kind", "backend", "device", "port", "dtype", "fingerprint")
    return {"model": manifest.model.name, **{name: getattr(manifest, name) for name in named}}


def _status(status: str, owner: str) -> str:
    if status == RUNNING and owner.count(":") >= 2 and is_gone(owner):
        return INTERRUPTED
    return status


def owner() -> str:
    """Return ``host:pid:start`` of this process; ``start`` tells it from later ones of its pid."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def is_gone(tag: str) -> bool:
    """Return whether the process of an `owner` tag ended; False on any other host."""
    host, pid, started = tag.rsplit(":", 2)
    return host == socket.gethostname() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Return a live process's start time in clock ticks since boot, or an empty string."""
    proc = Path("/proc")
    if not (proc / "self").exists():
        return "alive" if _answers(pid) else ""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold spaces and brackets itself, so count from the last one.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
