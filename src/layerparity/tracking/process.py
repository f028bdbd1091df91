"""Process: its environment as MLflow reads it, and the signals that end it as exceptions."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

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
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The blocks of `terminable` that are open.
_blocks: list[object] = []
# What the signals of this process raised.
_raised: list[BaseException] = []
# Long enough for Python to be out of what let nothing through; and how long to wait for that: who
# waits longer for a lock may never get it.
_AGAIN_S, _PATIENCE_S = 0.05, 2.0
# When the first signal came that was put off, by time.monotonic().
_put_off: list[float] = []
# Nothing is raised inside of these. It would leave a lock taken that nobody gives back, or a thread
# of a pool that nobody knows and therefore nobody ends: the process waits for it for ever.
_INDIVISIBLE = frozenset(
    each.__code__
    for each in (
        threading.Condition.__enter__,
        threading.Condition.__exit__,
        threading.Condition._acquire_restore,  # type: ignore[attr-defined]
        threading.Thread.start,
        ThreadPoolExecutor.submit,
        logging.Handler.acquire,
        logging.Handler.release,
    )
)


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
    # Else one that answers "not now" says itself how long: an hour, and nobody is told.
    os.environ["MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER"] = "false"
    os.environ[TIMEOUT] = str(timeout_s)


@contextmanager
def terminable(for_good: bool = False) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into an exception; ignore all until the block ends.

    Ctrl-C is KeyboardInterrupt, the others SystemExit of 128 and the signal's number. Of nested
    blocks the outermost ends the ignoring; with ``for_good`` nobody does. What was ignored before,
    such as SIGHUP under nohup, stays so. Where nothing can be raised, as in ``__del__``, or nothing
    may be, as while a thread starts, it is raised a moment later. Does nothing outside the main
    thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {each: signal.getsignal(each) for each in _ENDING}
    left = (None, signal.SIG_IGN, _ignore)
    before = {each: handler for each, handler in former.items() if handler not in left}
    nested = bool(_blocks)
    _blocks.append(before)
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_raise_later, hook)
    for each in before:
        signal.signal(each, _raise_once)
    try:
        yield
    finally:
        _blocks.pop()
        sys.unraisablehook = hook
        stopped = any(signal.getsignal(each) is _ignore for each in before)
        for each, handler in () if stopped and nested else before.items():
            # When Python ends it takes back handlers, but not this.
            signal.signal(each, signal.SIG_IGN if stopped and for_good else handler)


def _raise_once(number: int, frame: FrameType | None) -> None:
    if _is_indivisible(frame):
        _put_off.append(time.monotonic())
        if _put_off[-1] - _put_off[0] < _PATIENCE_S:
            # Not by `Thread`: this may be inside of one's start.
            _thread.start_new_thread(_send_again, (number,))
            return
    _put_off.clear()
    # What closes down must not be cut short by an impatient second signal.
    for each in _ENDING:
        if signal.getsignal(each) is _raise_once:
            signal.signal(each, _ignore)
    stop = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    _raised.append(stop)
    raise stop


def _raise_later(others: Callable[[Any], object], unraisable: Any) -> None:
    """Send a signal once more whose exception Python would print and forget; hand on others."""
    stop = unraisable.exc_value
    if not is_of_a_signal(stop):
        others(unraisable)
        return
    for each in _ENDING:
        if signal.getsignal(each) is _ignore:
            signal.signal(each, _raise_once)
    number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.code - 128
    _thread.start_new_thread(_send_again, (number,))


def _is_indivisible(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _INDIVISIBLE:
        frame = frame.f_back
    return frame is not None


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    # Unlike SIG_IGN also where one arrived already, of which Python would complain.
    pass


def is_of_a_signal(error: BaseException) -> bool:
    """Say whether a signal raised this, and no library that ends the process by itself."""
    return any(error is each for each in _raised)


def stop_behind(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or SystemExit that an exception is, or that it hides.

    A terminal that hung up makes each line that is printed on the way out an error of its own.
    """
    while error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
        error = error.__context__
    return error


@contextmanager
def unhidden() -> Iterator[None]:
    """Raise what a signal raised in a block also where an error hides it.

    What another library puts in order on the way out may fail, for what it was about to do was not
    done. What else raises SystemExit is no signal.
    """
    try:
        yield
    except Exception as error:
        stop = stop_behind(error)
        if stop is None or not is_of_a_signal(stop):
            raise
        raise stop from None


def name_of(stop: BaseException) -> str:
    """Return what a user calls a `stop_behind`: Ctrl-C, or the name of the signal."""
    if isinstance(stop, KeyboardInterrupt):
        return "Ctrl-C"
    known = {128 + number: signal.Signals(number).name for number in _ENDING}
    return known.get(getattr(stop, "code", None) or 0, "SIGTERM")
