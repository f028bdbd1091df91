"""Machine: what a container leaves of its CPUs and memory, and the folder where a path begins."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many CPUs this process may use, quotas of a container counted."""
    count = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            count = min(count, max(1, round(int(quota) / int(period))))
    return count


def memory_left() -> int | None:
    """Return the bytes that containers leave this process, or None where none has a limit.

    What a container holds of files can be given back, and counts as free.
    """
    left = []
    for group in _groups():
        limit, held = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and held.isdigit():
            left.append(max(0, int(limit) - int(held) + _cached(group)))
    return min(left, default=None)


def nearest_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _groups() -> list[Path]:
    """Return the control groups this process is in, its own first; version 2 of the interface."""
    lines = _read(OWN_GROUP).splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    inside = CGROUPS / own.strip("/")
    return [each for each in (inside, *inside.parents) if each.is_relative_to(CGROUPS)]


def _cached(group: Path) -> int:
    words = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(count) for name, count in words if name in ("active_file", "inactive_file"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
