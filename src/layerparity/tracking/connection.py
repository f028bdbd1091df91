"""Connection: what talks to MLflow, at an embedded database or at a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database, names
from layerparity.tracking.failures import user_errors
from layerparity.tracking.view import WORKFLOW, runs_url, shared_view

if TYPE_CHECKING:
    from mlflow import MlflowClient

# MLflow's limit.
TAGS_PER_REQUEST = 100
# What MLflow calls it where its database refuses to add what is there, and how often that may be.
_REFUSED_BY_DATABASE, _TIMES = "BAD_REQUEST", 4


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
