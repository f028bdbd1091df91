"""System metrics: how busy processor, memory, disk, network and GPUs were while a run ran.

MLflow's own monitors sample them; the samples go to the run in one piece when it ends, so that
nobody writes to the store while blocks are computed.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any

_LOG = logging.getLogger(__name__)
_INTERVAL = 1.0
PREFIX = "system/"
Point = tuple[str, float, int]


class SystemMetrics:
    """Samples this machine each second while it is open; ``points`` are (name, value, second)."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._stop = threading.Event()
        self._began = time.monotonic()

        def watch() -> None:
            while not self._stop.wait(_INTERVAL):
                self._sample()

        self._thread = threading.Thread(target=watch, name="system metrics", daemon=True)

    def __enter__(self) -> SystemMetrics:
        self._monitors = _monitors()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        second = int(time.monotonic() - self._began)
        for monitor in list(self._monitors):
            try:
                monitor.collect_metrics()
                values = monitor.aggregate_metrics()
                monitor.clear_metrics()
            except Exception as error:
                # A machine without a network, or a driver that went away, must not cost a run.
                _LOG.warning("%s is watched no more: %s", type(monitor).__name__, error)
                self._monitors.remove(monitor)
                continue
            self.points += [
                (f"{PREFIX}{name}", float(value), second) for name, value in values.items()
            ]


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            monitors.append(kind())
        except Exception as error:
            # No network, no GPU or no nvidia-ml-py: each has an exception of its own.
            _LOG.debug("%s does not work here: %s", kind.__name__, error)
    return monitors
