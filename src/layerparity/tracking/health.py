"""Health: describe a store that can be used, or say why it cannot; nothing is made in it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from filelock import FileLock, Timeout

from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure
from layerparity.settings.tracking import EMBEDDED, TrackingConfig, read_config
from layerparity.tracking import database
from layerparity.tracking.failures import user_errors
from layerparity.tracking.opening import knock, served_experiment, server_version
from layerparity.tracking.process import prepare_environment

_LOCK_SECONDS = 5


def describe(raw: object) -> str:
    """Return what a store is, in one line. Raises UserError, with the cure, if it cannot be used.

    Imports mlflow (seconds) where there is a store.
    """
    config = read_config(raw)
    prepare_environment(config.timeout_s)
    return _embedded(config) if config.name == EMBEDDED else _server(config)


def _embedded(config: TrackingConfig) -> str:
    root = config.root
    database.refuse_path(root)
    if not (root / database.FILE_NAME).exists():
        nearest = next(each for each in (root, *root.parents) if each.exists())
        if not nearest.is_dir():
            cure = f"move the file away, {database.ELSEWHERE}."
            raise UserError(f"{nearest} is not a folder", cure)
        if not os.access(nearest, os.W_OK | os.X_OK):
            cure = f"change its permissions, {database.ELSEWHERE}."
            raise UserError(f"Cannot write to {nearest}", cure)
        return f"none at {root} yet: the first run makes it"
    _refuse_locked(root)
    database.check(root)
    from mlflow import MlflowClient

    with user_errors(config):
        # MLflow itself refuses a database of another version's schema.
        MlflowClient(database.database_uri(root)).search_experiments(max_results=1)
    with closing(sqlite3.connect(root / database.FILE_NAME, timeout=_LOCK_SECONDS)) as opened:
        (schema,) = opened.execute("SELECT version_num FROM alembic_version").fetchone()
        (runs,) = opened.execute("SELECT count(*) FROM runs").fetchone()
    return f"{root}: opens and can be written to, {runs} runs, schema {schema}"


def _server(config: TrackingConfig) -> str:
    knock(config)
    from mlflow import MlflowClient

    with user_errors(config):
        experiment = served_experiment(config, MlflowClient(config.address))
    has = "has" if experiment is not None else "does not have yet"
    version = server_version(config.address, config.timeout_s) or "of unknown version"
    answer = f"{config.address} answers, MLflow {version}"
    return f"{answer}; it {has} the experiment '{config.experiment}'"


def _refuse_locked(root: Path) -> None:
    try:
        with FileLock(root / f"{database.FILE_NAME}.lock", timeout=_LOCK_SECONDS):
            pass
    except Timeout as error:
        raise UserError(
            f"Another process holds {error.lock_file}",
            f"wait for it, end it, {database.ELSEWHERE}.",
        ) from error
    except OSError as error:
        raise UserError(
            f"Cannot write to {root} ({error.strerror})",
            f"{disk_cure(error)}, {database.ELSEWHERE}.",
        ) from error
