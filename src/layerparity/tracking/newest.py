"""Read what the newest run of a kind recorded, without making anything in a store."""

from __future__ import annotations

from layerparity.settings.tracking import EMBEDDED, read_config
from layerparity.tracking import database
from layerparity.tracking.connection import Connection, knock, served_experiment
from layerparity.tracking.failures import user_errors
from layerparity.tracking.process import prepare_environment
from layerparity.tracking.stored_runs import StoredRuns


def newest_tags(raw: object, kind: str) -> dict[str, str] | None:
    """Return the tags, and as ``name`` the name, of the newest finished run of a kind, or None.

    Imports mlflow (seconds) where there is a store. Raises UserError where it cannot be used.
    """
    config = read_config(raw)
    prepare_environment(config.timeout_s)
    if config.name == EMBEDDED:
        if not (config.root / database.FILE_NAME).exists():
            return None
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
        return None
    run = StoredRuns(Connection(config, client, experiment.experiment_id)).newest(kind)
    return None if run is None else {**run.tags, "name": run.name}
