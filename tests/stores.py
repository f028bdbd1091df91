"""Embedded stores for tests: MLflow's first start takes seconds, so it is paid once per session."""

from __future__ import annotations

import functools
import shutil
import socket
import tempfile
from pathlib import Path

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.store import Store, open_store


@functools.cache
def _template() -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="layerparity-store-")
    open_store(TrackingConfig(folder=folder.name, experiment="template"))
    return folder


def fresh_config(folder: Path, **changes) -> TrackingConfig:
    """Return the config of an empty embedded store in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(_template().name).glob("mlflow.db*"):
        shutil.copy(path, folder)
    return TrackingConfig(folder=str(folder), **changes)


def fresh_store(folder: Path) -> Store:
    """Return an empty embedded store in ``folder``."""
    return open_store(fresh_config(folder))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
