"""Moments of a command for `tools/faults.py`: where it may be stopped, and by what clock it runs.

Nothing in the product knows of them: a process patches functions of its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where a process may be stopped: whatever changes a store, each before and after.
POINTS = (
    "layerparity.tracking.database:make",
    "layerparity.tracking.database:check",
    "layerparity.tracking.interrupted:end_abandoned",
    "layerparity.tracking.interrupted:unmark",
    "layerparity.tracking.store:Store.begin",
    "layerparity.tracking.active:ActiveRun.log_text",
    "layerparity.tracking.active:ActiveRun.end",
    "layerparity.record.folder:RunFolder.write_tensors",
    "layerparity.record.folder:RunFolder.write_text",
    "layerparity.record.folder:RunFolder.write_manifest",
    "layerparity.making.sweep:close_parent",
    "layerparity.machine.owner:remove_abandoned",
    "mlflow:MlflowClient.create_run",
    "mlflow:MlflowClient.log_batch",
    "mlflow:MlflowClient.set_tag",
    "mlflow:MlflowClient.set_terminated",
    "mlflow:MlflowClient.log_artifact",
    "pathlib:Path.replace",
    "os:fsync",
    "tempfile:mkstemp",
    "tempfile:mkdtemp",
)


@dataclass(frozen=True)
class Moment:
    """Before, or after, the ``nth`` call of a point."""

    point: str
    nth: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} call {self.nth} of {self.point}"


def patch(point: str, counts: Counter[str], trace: Path | None, stop: Moment | None) -> None:
    """Put a function in a point's place that notes each call, or ends the process at one."""
    module, _, path = point.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    whole, turn = getattr(owner, name), threading.Lock()

    def counted(*arguments: Any, **keys: Any) -> Any:
        with turn:
            counts[point] += 1
            nth = counts[point]
        if trace is not None:
            handle = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{point} {nth}\n".encode())
            os.close(handle)
        if stop == Moment(point, nth, after=False):
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(*arguments, **keys)
        if stop == Moment(point, nth, after=True):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def set_clock(first: float, calls: int, then: float) -> None:
    """Set the clock off by seconds, and by others after so many times that it is read."""
    true, read = time.time, 0

    def off() -> float:
        nonlocal read
        read += 1
        return true() + (first if read <= calls else then)

    time.time = off
    time.time_ns = lambda: int(off() * 1e9)
