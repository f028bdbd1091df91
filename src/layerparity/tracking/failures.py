"""Failures: what went wrong with a store or a tracking server, in one line with the cure."""

from __future__ import annotations

import re
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure
from layerparity.ground.secrets import redacted
from layerparity.settings.tracking import SERVER, TrackingConfig
from layerparity.tracking import database

_REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")
_UNKNOWN = "RESOURCE_DOES_NOT_EXIST"
_LOGIN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to a login that it takes."
_NO_RIGHT = "ask who runs it for the right, or set another MLFLOW_TRACKING_USERNAME and _PASSWORD."
# What stands behind a server: its log alone says what that answered.
_DATABASE = "look into its log, which says why: its database may not answer, or refuse its login."
_FILES = (
    "look into its log, which says why: its store of artifacts may not answer, or refuse the "
    "credentials that it was started with (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)."
)
_ARTIFACTS = "mlflow-artifacts"
_LISTED = "Failed to list artifacts"
_OTHER_SCHEMA = re.compile(r"Undefined(?:Table|Column)|no such (?:table|column)")
_WAIT = "wait until it is ready, and run the command again; its log, or its proxy's, says more."
# By the status of HTTP: what the server says by it, and what helps.
_STATUSES = {
    401: ("refuses us", _LOGIN),
    403: ("does not allow us this", _NO_RIGHT),
    408: ("took too long over a request", _WAIT),
    413: ("takes no file of this size", "raise the limit of the server, or of its proxy."),
    429: ("takes no more requests for now", "wait, and run the command again with fewer at once."),
    500: ("failed over a request", _DATABASE),
    502: ("is behind a proxy that cannot reach it", _WAIT),
    503: (
        "is not ready, or has too much to do",
        "wait until it is ready, and run the command again; its log says more: its database may "
        "not answer, or refuse its login.",
    ),
    504: ("is behind a proxy that waited too long for it", _WAIT),
    507: ("has no disk space left", "free some there."),
}
# By what an error of TLS says, the more telling one first.
_TLS = {
    "CERTIFICATE_VERIFY_FAILED": (
        "has a certificate that is not trusted here",
        "set MLFLOW_TRACKING_SERVER_CERT_PATH to the certificate of who signed it.",
    ),
    "SSLError": ("does not speak https", "begin tracking.uri with http://."),
}
_NOT_MLFLOW = "does not answer like an MLflow server"
_SILENT = (
    "does not answer",
    "start it, correct tracking.uri, or keep the runs here with tracking=embedded.",
)
# What MLflow says of a change to something that was deleted.
_DELETED = re.compile(r"The (run|experiment) (\w+) must be in the 'active' state")
# As urllib3, after its last try, and MLflow say a status.
_STATUS = re.compile(r"(?:too many|failed with error code) (\d{3})\b")
_TOO_SLOW = re.compile(r"Read timed out|ReadTimeout|timeout exception")


@contextmanager
def user_errors(
    config: TrackingConfig, identity: database.Identity | None = None
) -> Iterator[None]:
    """Raise UserError where disk, database or server failed; let bugs pass as they are.

    Also where the embedded store's database is no more the file of this ``identity``: sqlite goes
    on with a file that was removed, and what it writes there is lost.
    """
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import DBAPIError

    causes = (MlflowException, DBAPIError, sqlite3.Error)
    try:
        yield
    except (*causes, requests.RequestException, OSError) as error:
        _refuse_gone(config, identity, error)
        explained = _server if config.name == SERVER else _embedded
        known = _deleted(config, error) or explained(config, error)
        if known is None:
            raise
        raise known from error
    _refuse_gone(config, identity)


def _refuse_gone(
    config: TrackingConfig, identity: database.Identity | None, error: Exception | None = None
) -> None:
    if identity is not None and database.identity(config.root) != identity:
        raise database.gone(config.root) from error


def _deleted(config: TrackingConfig, error: Exception) -> UserError | None:
    """Return what is said where a run, or the experiment, is held as deleted; None elsewhere."""
    said = _DELETED.search(str(error))
    if said is None:
        return None
    what = f"{said[1].capitalize()} {said[2][:8]}"
    return UserError(
        f"{what} was deleted in {config.place} while this command used it",
        "restore it in MLflow's pages, or run the command again.",
    )


def _embedded(config: TrackingConfig, error: Exception) -> UserError | None:
    if isinstance(error, OSError):
        return _not_written(config, error)
    return database.explained(config.root, error)


def _not_written(config: TrackingConfig, error: OSError) -> UserError:
    found = f"Cannot write to {config.root} ({error.strerror or error})"
    return UserError(found, f"{disk_cure(error)}, {database.ELSEWHERE}.")


def _server(config: TrackingConfig, error: Exception) -> UserError | None:
    import requests
    from mlflow.exceptions import MlflowException, RestException

    where = f"The tracking server {config.address}"
    if isinstance(error, RestException) and _status_of(error) is None:
        return _refusal(where, error)
    if isinstance(error, (MlflowException, requests.RequestException)):
        what, cure = _answer(config, error)
        return UserError(f"{where} {what}", cure)
    if isinstance(error, (ConnectionError, TimeoutError)):
        return unreachable(config)
    # The spool and the cache are folders of this machine.
    return _not_written(config, error) if isinstance(error, OSError) else None


def _refusal(where: str, error: Any) -> UserError | None:
    """Return what is said of a request that MLflow refused; None for what we should not ask."""
    said = redacted(" ".join(error.message.split())[:200])
    if _LISTED in said:
        return UserError(f"{where} cannot use its store of artifacts ({said})", _FILES)
    if _OTHER_SCHEMA.search(said):
        return UserError(
            f"{where} has a database of another version of MLflow ({said})",
            "stop all servers that use it, copy it, and run 'mlflow db upgrade' where the "
            "server runs.",
        )
    if error.error_code in _REFUSED:
        return UserError(f"{where} refuses us ({said})", _LOGIN)
    if error.error_code != _UNKNOWN:
        return None
    found = f"{where} no longer knows what this command uses ({said})"
    return UserError(found, "its store was emptied or replaced; run the command again.")


def _answer(config: TrackingConfig, error: Exception) -> tuple[str, str]:
    """Return what a server did instead of answering as MLflow does, and what helps."""
    status, text = _status_of(error), str(error)
    reply = getattr(error, "response", None)
    files = _ARTIFACTS in text + str(getattr(reply, "url", ""))
    # By MLflow's own words its store of artifacts refused it; who refuses us says so otherwise.
    if files and status in (401, 403) and "error_code" in str(getattr(reply, "text", "")):
        return f"cannot use its store of artifacts (HTTP {status})", _FILES
    if status in _STATUSES:
        what, cure = _STATUSES[status]
        return f"{what} (HTTP {status})", _FILES if files and cure is _DATABASE else cure
    if status or "Response body" in text:
        number = f" (HTTP {status})" if status else ""
        return f"{_NOT_MLFLOW}{number}", "correct tracking.uri."
    if _TOO_SLOW.search(text):
        cure = "look at what keeps it (its log says whether its database answers), or give it "
        return (
            f"did not answer within {config.timeout_s} s",
            f"{cure}longer with tracking.timeout_s=SECONDS.",
        )
    for sign, what_and_cure in _TLS.items():
        if sign in text:
            return what_and_cure
    return _broken_off(config, _FILES if files else _DATABASE)


def _broken_off(config: TrackingConfig, cure: str) -> tuple[str, str]:
    """Return what is said of a server that gave no answer: whether it is there says what helps."""
    try:
        # Its database and its artifacts have no part in this one.
        with urllib.request.urlopen(f"{config.address}/health", timeout=2):  # noqa: S310
            return "broke off over a request", cure
    except urllib.error.HTTPError:
        return _NOT_MLFLOW, "correct tracking.uri."
    except urllib.error.URLError:
        return _SILENT
    except (OSError, HTTPException):
        # Something is there that knows nothing of HTTP.
        return _NOT_MLFLOW, "correct tracking.uri."


def _status_of(error: Any) -> int | None:
    """Return the status of HTTP that an exception of MLflow or requests is about, if any."""
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    said = _STATUS.search(str(error))
    return int(said[1]) if said else None


def no_mlflow(config: TrackingConfig) -> UserError:
    """Return what is raised for a server that answers, and not as MLflow does."""
    found = f"The tracking server {config.address} {_NOT_MLFLOW}"
    return UserError(found, "correct tracking.uri.")


def unreachable(config: TrackingConfig) -> UserError:
    """Return what is raised for a server that does not answer."""
    what, cure = _SILENT
    return UserError(f"The tracking server {config.address} {what}", cure)
