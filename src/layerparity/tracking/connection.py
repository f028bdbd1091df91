"""Connection: an MLflow client with the experiment it works in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.tracking import links
from layerparity.tracking.complaints import in_plain_words
from layerparity.tracking.config import TrackingConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Connection:
    """What every room of tracking needs to talk to MLflow. ``client`` is used inside `plainly`."""

    config: TrackingConfig
    client: MlflowClient
    experiment_id: str

    def plainly(self) -> AbstractContextManager[None]:
        """Return a block in which failures the user can mend become UserError."""
        return in_plain_words(self.config)

    def run_url(self, run_id: str, tab: str = "") -> str:
        """Return a run's page in the MLflow UI, or a tab of it."""
        return links.run_url(self.config.address, self.experiment_id, run_id, tab)
