"""Opening: the one place where a store is opened, to keep runs in or only to read it."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.record.stored_run import RUNNING, StoredRun
from layerparity.settings.tracking import EMBEDDED, SERVER, TrackingConfig, read_config
from layerparity.tracking import database, interrupted, spool
from layerparity.tracking.connection import Connection
from layerparity.tracking.failures import no_mlflow, unreachable, user_errors
from layerparity.tracking.process import prepare_environment
from layerparity.tracking.store import Store
from layerparity.tracking.stored_runs import PAGE, status_is
from layerparity.tracking.view import shared_view

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

_VERSION = re.compile(r"[0-9]+(\.[0-9]+)+[\w.+-]*")
# Versions of servers that were noted in this process.
_noted: set[str] = set()
# Keeps the UI from guessing what kind of work this is and showing the pages for chat traces.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development", **shared_view()}


def open_store(raw: object) -> Store:
    """Open the store that a `TrackingConfig`, or a config node with its keys, describes.

    Runs whose process is gone are ended, and those that wait for this server are uploaded.
    Imports mlflow (seconds). Raises UserError where the store cannot be used, with the cure.
    """
    config = read_config(raw)
    prepare_environment(config.timeout_s)
    link = _open_embedded(config) if config.name == EMBEDDED else _open_server(config)
    if config.name == SERVER:
        spool.settle(link)
    store = Store(link)
    interrupted.end_abandoned(link, store.search([status_is(RUNNING)], PAGE))
    return store


class NoRuns(Store):
    """A store that is not there yet: it holds no run."""

    def search(self, clauses: Sequence[str], limit: int) -> list[StoredRun]:
        """Return nothing."""
        return []

    def counted(self) -> int:
        """Return 0."""
        return 0


def open_to_read(raw: object) -> Store:
    """Open the store that `open_store` would open, as far as it is there: nothing is made or ended.

    Imports mlflow (seconds) where there is a store. Raises UserError where it cannot be used.
    """
    config = read_config(raw)
    prepare_environment(config.timeout_s)
    if config.name == EMBEDDED:
        if not (config.root / database.FILE_NAME).exists():
            return NoRuns(Connection(config, None, ""))
        database.check(config.root)
        address = database.database_uri(config.root)
    else:
        knock(config)
        address = config.address
    from mlflow import MlflowClient

    with user_errors(config):
        client = MlflowClient(address)
        experiment = served_experiment(config, client)
    if experiment is None:
        return NoRuns(Connection(config, client, ""))
    return Store(Connection(config, client, experiment.experiment_id))


def _open_embedded(config: TrackingConfig) -> Connection:
    """Connect to the store in the folder; it is made if it is not there."""
    # Seconds of imports, made before others have to wait for the lock.
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    from mlflow import MlflowClient

    root = config.root
    # Several processes that initialise one fresh store at once destroy it.
    with database.locked(root), user_errors(config):
        database.make(root, MlflowClient)
        database.check(root)
        client = MlflowClient(database.database_uri(root))
        experiment = _embedded_experiment(client, config)
        return Connection(config, client, experiment, database.identity(root))


def _open_server(config: TrackingConfig) -> Connection:
    """Connect to the server. Raises UserError within seconds where it does not answer."""
    knock(config)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    _note_version(config)
    with user_errors(config):
        client = MlflowClient(config.address)
        experiment = served_experiment(config, client)
        if experiment is None:
            try:
                new_id = client.create_experiment(config.experiment, tags=_EXPERIMENT_TAGS)
                return Connection(config, client, new_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                # Another process was quicker.
                experiment = served_experiment(config, client)
                assert experiment is not None, "the server says that it is there"
        _refuse_deleted(experiment, config)
        return Connection(config, client, experiment.experiment_id)


def served_experiment(config: TrackingConfig, client: MlflowClient) -> Experiment | None:
    """Return the experiment that a server has, if any. Raises UserError where it is no MLflow."""
    experiment = client.get_experiment_by_name(config.experiment)
    # To MLflow's client any JSON is an experiment, one without an id.
    if experiment is not None and not experiment.experiment_id:
        raise no_mlflow(config)
    return experiment


@cache
def server_version(address: str, timeout_s: int) -> str:
    """Return the version of MLflow that a server says it is, asked once; "" where it says none."""
    # A server, or its proxy, may well keep it for itself.
    with suppress(OSError, HTTPException):
        url = f"{address}/version"
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:  # noqa: S310
            text = str(reply.read(64).decode("ascii", "replace"))
            return text if _VERSION.fullmatch(text) else ""
    return ""


def _note_version(config: TrackingConfig) -> None:
    """Say so where the server's MLflow and the one here are of different versions; once."""
    import mlflow

    there, here = server_version(config.address, min(config.timeout_s, 2)), mlflow.__version__
    if there and there.split(".")[:2] != here.split(".")[:2] and there not in _noted:
        _noted.add(there)
        console.note(
            f"the tracking server is MLflow {there}, and here is {here}: if it refuses a request, "
            f"install mlflow=={there} here"
        )


def _embedded_experiment(client: MlflowClient, config: TrackingConfig) -> str:
    artifacts = (config.root / database.ARTIFACTS).as_uri()
    experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        return str(client.create_experiment(config.experiment, artifacts, _EXPERIMENT_TAGS))
    _refuse_deleted(experiment, config)
    if not experiment.artifact_location.startswith("file:"):
        raise UserError(
            f"Experiment '{config.experiment}' in {config.root} was made through a server",
            "use tracking=server, or choose another with tracking.experiment=NAME.",
        )
    # Ours always ends so; any other folder was somebody's choice.
    moved = experiment.artifact_location != artifacts
    if moved and experiment.artifact_location.endswith(f"/{database.ARTIFACTS}"):
        database.relocate(
            config.root, experiment.experiment_id, experiment.artifact_location, artifacts
        )
    return str(experiment.experiment_id)


def _refuse_deleted(experiment: Experiment, config: TrackingConfig) -> None:
    if experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"Experiment '{config.experiment}' was deleted in {config.place}",
            "restore it with "
            "'mlflow experiments restore', or choose another with tracking.experiment=NAME.",
        )


def knock(config: TrackingConfig) -> None:
    """Connect once, before seconds are spent on importing mlflow."""
    parts = urlsplit(config.address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=config.timeout_s):
            pass
    except ValueError as error:
        raise UserError(f"tracking.uri={config.uri} is not an address ({error}).") from error
    except OSError as error:
        raise unreachable(config) from error
