"""Machine: the CPUs this process may use, and the folder where a path begins."""

from __future__ import annotations

import os
from pathlib import Path

from layerparity.machine.memory import cpus_granted


def usable_cpus() -> int:
    """Return how many CPUs this process may use, quotas of a container counted."""
    count = len(os.sched_getaffinity(0))
    return min(count, cpus_granted() or count)


def nearest_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
