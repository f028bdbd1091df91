"""Host memory: what this process may still take, by the machine and by every limit on it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Return the bytes of anonymous memory that this process can take without swapping.

    The least of what the machine has, and what ``ulimit -d``, ``ulimit -v`` and the control group
    leave.
    """
    free = [int(psutil.virtual_memory().available)]
    free += [limit - used for limit, used in _limits() if limit is not None]
    return max(0, min(free))


def _limits() -> list[tuple[int | None, int]]:
    """Return each limit with what is used of it."""
    return [
        (_soft(resource.RLIMIT_DATA), _status_bytes("VmData")),
        (_soft(resource.RLIMIT_AS), _status_bytes("VmSize")),
        *(_group_limit(group) for group in _groups()),
    ]


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's control group, version 2, and of those above it."""
    table = Path(f"/proc/{os.getpid()}/cgroup")
    lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return
    group = _CGROUP / name.lstrip("/")
    while group.is_relative_to(_CGROUP):
        yield group
        group = group.parent


def _group_limit(group: Path) -> tuple[int | None, int]:
    """Return what a control group may hold in memory, and the anonymous memory it holds."""
    limit, stat = group / "memory.max", group / "memory.stat"
    if not limit.is_file() or not stat.is_file():
        return None, 0
    text = limit.read_text(encoding="ascii").strip()
    rows = stat.read_text(encoding="ascii").split("\n")
    used = next((int(row.split()[1]) for row in rows if row.startswith("anon ")), 0)
    return (int(text) if text.isdigit() else None), used
