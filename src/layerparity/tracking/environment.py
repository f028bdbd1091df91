"""Environment variables that MLflow reads: no telemetry, no chatter, a limit for each request."""

from __future__ import annotations

import os

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow logs a traceback of errors that it also raises; we report what was raised.
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    # The default server keeps job executors: 15 processes and 3 GB for a page of charts.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"


def prepare(timeout_s: int) -> None:
    """Set the variables; must run before mlflow is imported. The user's own values stay."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # One retry: with MLflow's seven, a server that is gone holds a run for four minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
    os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"] = "1"
    os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_JITTER"] = "0"
    os.environ[TIMEOUT] = str(timeout_s)
