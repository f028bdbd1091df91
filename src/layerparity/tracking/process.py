"""Process: its environment as MLflow reads it, SIGTERM as an exception, which one made a run."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Variables that MLflow reads: no telemetry, no chatter, a limit for each request.
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
_STATUS = 128 + signal.SIGTERM


def prepare_environment(timeout_s: int) -> None:
    """Set what MLflow reads, ``timeout_s`` seconds a request, before mlflow is imported.

    The user's own values stay.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # One retry: with MLflow's seven, a server that is gone holds a run for four minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
    os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"] = "1"
    os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_JITTER"] = "0"
    os.environ[TIMEOUT] = str(timeout_s)


@contextmanager
def terminable() -> Iterator[None]:
    """Turn the first SIGTERM into SystemExit(143); further ones are ignored until the block ends.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_once(number: int, _frame: FrameType | None) -> None:
        # What closes down must not be cut short by an impatient second signal.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(_STATUS)

    before = signal.signal(signal.SIGTERM, raise_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def owner_tag() -> str:
    """Return ``host:pid:start`` of this process; ``start`` tells it from later ones of its pid."""
    return f"{socket.gethostname()}:{os.getpid()}:{start_of(os.getpid())}"


def has_ended(tag: str) -> bool:
    """Return whether the process of an `owner_tag` ended; False on any other host."""
    host, pid, start = tag.rsplit(":", 2)
    return host == socket.gethostname() and start_of(int(pid)) != start


def start_of(pid: int) -> str:
    """Return a live process's start time in clock ticks since boot, or an empty string.

    Where there is no /proc, every live process gets one text.
    """
    proc = Path("/proc")
    if (proc / "self").exists():
        try:
            stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        # The name in brackets may hold spaces and brackets itself, so count from the last one.
        state, *rest = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except OSError:
        return ""
    return "alive"
