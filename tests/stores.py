"""Embedded stores for tests."""

from __future__ import annotations

import socket
from pathlib import Path

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database
from layerparity.tracking.opening import open_store
from layerparity.tracking.process import prepare_environment
from layerparity.tracking.store import Store


def fresh_config(folder: Path, **changes) -> TrackingConfig:
    """Return the config of an embedded store in ``folder``, made but never opened."""
    config = TrackingConfig(folder=str(folder), **changes)
    prepare_environment(config.timeout_s)
    from mlflow import MlflowClient

    with database.locked(config.root):
        database.make(config.root, MlflowClient)
    return config


def fresh_store(folder: Path) -> Store:
    """Return an empty embedded store in ``folder``."""
    return open_store(fresh_config(folder))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
