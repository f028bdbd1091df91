"""Owner: which process made a run, and whether it is still alive."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def owner() -> str:
    """Return ``host:pid:start`` of this process; ``start`` tells it from later ones of its pid."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def is_gone(tag: str) -> bool:
    """Return whether the process of an `owner` tag ended; False on any other host."""
    host, pid, started = tag.rsplit(":", 2)
    return host == socket.gethostname() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Return a live process's start time in clock ticks since boot, or an empty string."""
    proc = Path("/proc")
    if not (proc / "self").exists():
        return "alive" if _answers(pid) else ""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold spaces and brackets itself, so count from the last one.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
