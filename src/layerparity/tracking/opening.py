"""Opening a store: the embedded one under its lock, or a server that answers in time."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layerparity.errors import UserError
from layerparity.tracking import database
from layerparity.tracking.complaints import in_plain_words, unreachable
from layerparity.tracking.config import TrackingConfig
from layerparity.tracking.connection import Connection

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

# Keeps the UI from guessing what kind of work this is and showing the pages for chat traces.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


def open_embedded(config: TrackingConfig) -> Connection:
    """Connect to the store in the folder; it is made if it is not there."""
    # Seconds of imports, made before others have to wait for the lock.
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    from mlflow import MlflowClient

    root = config.root
    # Several processes that initialise one fresh store at once destroy it.
    with database.locked(root), in_plain_words(config):
        database.make(root, MlflowClient)
        database.check(root)
        client = MlflowClient(database.database_uri(root))
        return Connection(config, client, _embedded_experiment(client, config))


def open_server(config: TrackingConfig) -> Connection:
    """Connect to the server. Raises UserError within seconds where it does not answer."""
    knock(config)
    from mlflow import MlflowClient

    with in_plain_words(config):
        client = MlflowClient(config.address)
        return Connection(config, client, _server_experiment(client, config))


def _server_experiment(client: MlflowClient, config: TrackingConfig) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(config.experiment)
    if found is None:
        try:
            return client.create_experiment(config.experiment, tags=_EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            # Another process was quicker.
            found = client.get_experiment_by_name(config.experiment)
    return _alive(found, config).experiment_id


def _embedded_experiment(client: MlflowClient, config: TrackingConfig) -> str:
    artifacts = (config.root / database.ARTIFACTS).as_uri()
    found = client.get_experiment_by_name(config.experiment)
    if found is None:
        return client.create_experiment(config.experiment, artifacts, _EXPERIMENT_TAGS)
    _alive(found, config)
    if not found.artifact_location.startswith("file:"):
        raise UserError(
            f"Experiment '{config.experiment}' in {config.root} was made through a server: "
            "use tracking=server, or choose another with tracking.experiment=NAME."
        )
    # Ours always ends so; any other folder was somebody's choice.
    moved = found.artifact_location != artifacts
    if moved and found.artifact_location.endswith(f"/{database.ARTIFACTS}"):
        database.relocate(config.root, found.experiment_id, found.artifact_location, artifacts)
    return found.experiment_id


def _alive(found: Experiment, config: TrackingConfig) -> Experiment:
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"Experiment '{config.experiment}' was deleted in {config.place}: restore it with "
            "'mlflow experiments restore', or choose another with tracking.experiment=NAME."
        )
    return found


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
        raise UserError(unreachable(config)) from error
