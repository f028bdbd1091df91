"""Connection: open the embedded store under its lock, or a server; say its failures in a line."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from layerparity.ground.errors import UserError
from layerparity.settings.tracking import SERVER, TrackingConfig
from layerparity.tracking import database

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
    with database.locked(root), user_errors(config):
        database.make(root, MlflowClient)
        database.check(root)
        client = MlflowClient(database.database_uri(root))
        return Connection(config, client, _embedded_experiment(client, config))


def open_server(config: TrackingConfig) -> Connection:
    """Connect to the server. Raises UserError within seconds where it does not answer."""
    knock(config)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with user_errors(config):
        client = MlflowClient(config.address)
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            try:
                new_id = client.create_experiment(config.experiment, tags=_EXPERIMENT_TAGS)
                return Connection(config, client, new_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                # Another process was quicker.
                experiment = client.get_experiment_by_name(config.experiment)
        _refuse_deleted(experiment, config)
        return Connection(config, client, experiment.experiment_id)


def _embedded_experiment(client: MlflowClient, config: TrackingConfig) -> str:
    artifacts = (config.root / database.ARTIFACTS).as_uri()
    experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        return client.create_experiment(config.experiment, artifacts, _EXPERIMENT_TAGS)
    _refuse_deleted(experiment, config)
    if not experiment.artifact_location.startswith("file:"):
        raise UserError(
            f"Experiment '{config.experiment}' in {config.root} was made through a server: "
            "use tracking=server, or choose another with tracking.experiment=NAME."
        )
    # Ours always ends so; any other folder was somebody's choice.
    moved = experiment.artifact_location != artifacts
    if moved and experiment.artifact_location.endswith(f"/{database.ARTIFACTS}"):
        database.relocate(
            config.root, experiment.experiment_id, experiment.artifact_location, artifacts
        )
    return experiment.experiment_id


def _refuse_deleted(experiment: Experiment, config: TrackingConfig) -> None:
    if experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"Experiment '{config.experiment}' was deleted in {config.place}: restore it with "
            "'mlflow experiments restore', or choose another with tracking.experiment=NAME."
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


@dataclass(frozen=True)
class Connection:
    """What talks to MLflow: ``client``, used inside `user_errors`, and the experiment."""

    config: TrackingConfig
    client: MlflowClient
    experiment_id: str

    def user_errors(self) -> AbstractContextManager[None]:
        """Return a block in which failures the user can mend become UserError."""
        return user_errors(self.config)

    def run_url(self, run_id: str, tab: str = "") -> str:
        """Return a run's page in the MLflow UI, or a tab of it."""
        return run_url(self.config.address, self.experiment_id, run_id, tab)


# Without it the UI opens its pages for chat traces, where our runs are called evaluations.
_VIEW = "workflowType=machine_learning"


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """Return a run's page, or a tab of it such as ``model-metrics`` or ``artifacts/x.html``."""
    page = f"{base}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{page}/{quote(tab)}?{_VIEW}" if tab else f"{page}?{_VIEW}"


# By what stands in an exception: what is wrong, and what to do about it.
_EMBEDDED = {
    "disk is full": ("the disk is full", "make room"),
    "readonly database": ("the database cannot be written to", "change its permissions"),
    "unable to open database": ("the database cannot be opened", "change the folder's permissions"),
    "database is locked": ("another process keeps the database locked", "end it"),
    "disk I/O error": ("the disk reports an error", "check it"),
    "out-of-date database schema": (
        "another version of MLflow made them",
        "install that version, or run 'mlflow db upgrade' with this one after a backup",
    ),
    "Can't locate revision": ("a newer version of MLflow made them", "install that version"),
}
_ELSEWHERE = "choose another folder with tracking.folder=FOLDER"
_REFUSED = ("401", "403", "PERMISSION_DENIED", "UNAUTHENTICATED")


@contextmanager
def user_errors(config: TrackingConfig) -> Iterator[None]:
    """Raise UserError where disk, database or server failed; let bugs pass as they are."""
    import requests
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, CommandError, requests.RequestException, OSError) as error:
        known = _server(config, error) if config.name == SERVER else _embedded(config, error)
        if known is None:
            raise
        raise known from error


def _embedded(config: TrackingConfig, error: Exception) -> UserError | None:
    if isinstance(error, OSError):
        found = f"Cannot write to {config.root} ({error.strerror or error})"
        return UserError(found, f"{_ELSEWHERE}.")
    for sign, (what, cure) in _EMBEDDED.items():
        if sign in str(error):
            found = f"The runs in {config.root} cannot be used: {what}"
            return UserError(found, f"{cure}, or {_ELSEWHERE}.")
    return None


def _server(config: TrackingConfig, error: Exception) -> UserError | None:
    import requests
    from mlflow.exceptions import MlflowException, RestException

    if not isinstance(error, (MlflowException, requests.RequestException)):
        return None
    text = str(error)
    where = f"The tracking server {config.address}"
    if any(sign in text for sign in _REFUSED):
        cure = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        return UserError(f"{where} refuses us", cure)
    if isinstance(error, RestException):
        return None
    if "error code" in text or "Response body" in text:
        return UserError(f"{where} does not answer like an MLflow server", "correct tracking.uri.")
    return unreachable(config)


def unreachable(config: TrackingConfig) -> UserError:
    """Return what is raised for a server that does not answer."""
    return UserError(
        f"The tracking server {config.address} does not answer",
        "start it, correct tracking.uri, or keep the runs here with tracking=embedded.",
    )
