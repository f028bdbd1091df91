"""Open a store to read it, without making anything there, and read what its newest run recorded."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.record.stored_run import StoredRun
from layerparity.settings.tracking import EMBEDDED, read_config
from layerparity.tracking import database
from layerparity.tracking.connection import Connection, knock, served_experiment
from layerparity.tracking.failures import user_errors
from layerparity.tracking.process import prepare_environment
from layerparity.tracking.store import Store


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


def newest_tags(raw: object, kind: str) -> dict[str, str] | None:
    """Return the tags, and as ``name`` the name, of the newest finished run of a kind, or None.

    Imports mlflow (seconds) where there is a store. Raises UserError where it cannot be used.
    """
    run = open_to_read(raw).newest(kind)
    return None if run is None else {**run.tags, "name": run.name}
