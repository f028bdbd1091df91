"""SIGTERM as an exception, so that what is open can be closed before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM


@contextmanager
def terminable() -> Iterator[None]:
    """Turn the first SIGTERM into SystemExit(143); further ones are ignored until the block ends.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_once(number: int, _frame: FrameType | None) -> None:
    # What closes down must not be cut short by an impatient second signal.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(STATUS)
