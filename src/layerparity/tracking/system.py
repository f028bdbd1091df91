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
        self._thread = threading.Thread(target=self._watch, name="system metrics", daemon=True)

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

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._sample()

    def _sample(self) -> None:
        second = int(time.monotonic() - self._began)
        for monitor in self._monitors:
            monitor.collect_metrics()
            for name, value in monitor.aggregate_metrics().items():
                self.points.append((f"{PREFIX}{name}", float(value), second))
            monitor.clear_metrics()


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

        found.append(GPUMonitor())
    except (ImportError, RuntimeError) as error:
        # Without nvidia-ml-py, or without a GPU.
        _LOG.debug("No GPU is watched: %s", error)
    return found
