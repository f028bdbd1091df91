"""MLflow's failures that the user can mend, in one message with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layerparity.errors import UserError
from layerparity.tracking.config import SERVER, TrackingConfig

_EMBEDDED = {
    "disk is full": "the disk is full: make room",
    "readonly database": "the database cannot be written to: change its permissions",
    "unable to open database": "the database cannot be opened: change the folder's permissions",
    "database is locked": "another process keeps the database locked: end it",
    "disk I/O error": "the disk reports an error: check it",
    "out-of-date database schema": "another version of MLflow made them: install that version, or "
    "run 'mlflow db upgrade' with this one after a backup",
    "Can't locate revision": "a newer version of MLflow made them: install that version",
}
_ELSEWHERE = "choose another folder with tracking.folder=FOLDER"
_REFUSED = ("401", "403", "PERMISSION_DENIED", "UNAUTHENTICATED")


@contextmanager
def in_plain_words(config: TrackingConfig) -> Iterator[None]:
    """Raise UserError where disk, database or server failed; let bugs pass as they are."""
    import requests
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, CommandError, requests.RequestException, OSError) as error:
        told = _server(config, error) if config.name == SERVER else _embedded(config, error)
        if told is None:
            raise
        raise UserError(told) from error


def _embedded(config: TrackingConfig, error: Exception) -> str | None:
    if isinstance(error, OSError):
        return f"Cannot write to {config.root} ({error.strerror or error}): {_ELSEWHERE}."
    cures = (cure for sign, cure in _EMBEDDED.items() if sign in str(error))
    cure = next(cures, None)
    return cure and f"The runs in {config.root} cannot be used: {cure}, or {_ELSEWHERE}."


def _server(config: TrackingConfig, error: Exception) -> str | None:
    import requests
    from mlflow.exceptions import MlflowException, RestException

    if not isinstance(error, (MlflowException, requests.RequestException)):
        return None
    text = str(error)
    where = f"The tracking server {config.address}"
    if any(sign in text for sign in _REFUSED):
        return f"{where} refuses us: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
    if isinstance(error, RestException):
        return None
    if "error code" in text or "Response body" in text:
        return f"{where} does not answer like an MLflow server: correct tracking.uri."
    return unreachable(config)


def unreachable(config: TrackingConfig) -> str:
    """Return the message for a server that does not answer."""
    return (
        f"The tracking server {config.address} does not answer: start it, correct tracking.uri, "
        "or keep the runs here with tracking=embedded."
    )
