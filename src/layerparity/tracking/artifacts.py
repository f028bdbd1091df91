"""Artifacts: where a local store keeps the files of runs, and how a server gets and gives them."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from layerparity.machine import owner
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import fetched
from layerparity.tracking.process import TIMEOUT

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TRANSFER_SECONDS = 120


def local_folder(artifact_uri: str) -> Path | None:
    """Return the folder behind an artifact address, or None where it is no local folder."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(artifact_uri) if parts.scheme == "" else None


def upload(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Send every file of a folder, leaving out temporary ones (their names begin with a dot)."""
    with transfer():
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                inside = path.parent.relative_to(folder).as_posix()
                client.log_artifact(run_id, str(path), None if inside == "." else inside)


def download(
    client: MlflowClient, run_id: str, path: str, target: Path, config: TrackingConfig
) -> Path:
    """Return ``target`` holding an artifact (a file, or a folder), fetched unless it is there.

    An empty path is the whole folder. Where the run has no such file, ``target`` does not exist.
    The target lies in the cache of ``config``, where is also what is not whole yet.
    """
    cache = fetched.folder(config.root)
    fetched.use(config.root, run_id)
    if target.exists():
        return target
    listed = client.list_artifacts(run_id, posixpath.dirname(path) or None) if path else []
    if path and path not in {each.path for each in listed}:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # What killed processes began to fetch is nobody's.
    owner.remove_abandoned(cache)
    part = Path(tempfile.mkdtemp(prefix=owner.prefix("fetch"), dir=cache))
    try:
        with transfer():
            brought = Path(client.download_artifacts(run_id, path, str(part)))
        fetched.put(brought, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(each.stat().st_size for each in (target, *target.rglob("*")) if each.is_file())
    fetched.make_room(config, size)
    return target


@contextmanager
def transfer() -> Iterator[None]:
    """Allow a request as long as a file of many gigabytes needs."""
    before = os.environ.get(TIMEOUT, "")
    os.environ[TIMEOUT] = str(_TRANSFER_SECONDS)
    try:
        yield
    finally:
        os.environ[TIMEOUT] = before
