"""Connection: open the embedded store under its lock, or a server, and talk to MLflow there."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database, names
from layerparity.tracking.failures import no_mlflow, unreachable, user_errors
from layerparity.tracking.view import WORKFLOW, runs_url, shared_view

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

# MLflow's limit.
TAGS_PER_REQUEST = 100
# What MLflow calls it where its database refuses to add what is there, and how often that may be.
_REFUSED_BY_DATABASE, _TIMES = "BAD_REQUEST", 4
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)+[\w.+-]*")
# Versions of servers that were noted in this process.
_noted: set[str] = set()
# Keeps the UI from guessing what kind of work this is and showing the pages for chat traces.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development", **shared_view()}


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
        experiment = _embedded_experiment(client, config)
        return Connection(config, client, experiment, database.identity(root))


def open_server(config: TrackingConfig) -> Connection:
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


@dataclass(frozen=True)
class Connection:
    """What talks to MLflow: ``client``, used inside `user_errors`, and the experiment.

    ``identity`` is that of the embedded store's database when it was opened.
    """

    config: TrackingConfig
    client: MlflowClient
    experiment_id: str
    identity: database.Identity | None = None

    def user_errors(self) -> AbstractContextManager[None]:
        """Return a block in which failures the user can mend become UserError.

        So does a store that is gone, of which sqlite itself may say nothing.
        """
        return user_errors(self.config, self.identity)

    def insist(self, request: Callable[..., object], *arguments: object, **more: object) -> None:
        """Make a request of ``client`` that may be made twice, again where others were quicker.

        MLflow looks whether a tag, a dataset or a series is there, and then adds it. Where several
        processes do so at once its database refuses all but one; the next time each finds it.
        """
        from mlflow.exceptions import MlflowException

        with self.user_errors():
            for left in reversed(range(_TIMES)):
                try:
                    request(*arguments, **more)
                    return
                except MlflowException as error:
                    if error.error_code != _REFUSED_BY_DATABASE or not left:
                        raise

    def set_tags(self, run_id: str, tags: Mapping[str, object]) -> None:
        """Set tags of ours on any run; see `names.own_tags`.

        Not by MLflow's set_tag, which does not look again for what another command adds.
        """
        from mlflow.entities import RunTag

        texts = [RunTag(*pair) for pair in names.own_tags(tags).items()]
        for start in range(0, len(texts), TAGS_PER_REQUEST):
            some = texts[start : start + TAGS_PER_REQUEST]
            self.insist(self.client.log_batch, run_id, tags=some)

    def run_url(self, run_id: str, tab: str = "") -> str:
        """Return a run's page in the MLflow UI, or a tab of it."""
        return run_url(self.config.address, self.experiment_id, run_id, tab)

    def runs_url(self) -> str:
        """Return the page that lists the runs, in the view that the experiment keeps.

        An experiment of an older version, or one that others made, gets the view.
        """
        with self.user_errors():
            kept = self.client.get_experiment(self.experiment_id).tags
        for tag, value in shared_view().items():
            if kept.get(tag) != value:
                self.insist(self.client.set_experiment_tag, self.experiment_id, tag, value)
        return runs_url(self.config.address, self.experiment_id)


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """Return a run's page, or a tab of it such as ``model-metrics`` or ``artifacts/x.html``."""
    page = f"{base}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{page}/{quote(tab)}?{WORKFLOW}" if tab else f"{page}?{WORKFLOW}"
