"""Host memory: what this process may still take, by the machine and by every limit on it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from layerparity.backends import _control_groups
from layerparity.console import bytes_text
from layerparity.errors import UserError

_STATUS = Path("/proc/self/status")
# Measured with torch 2.9 after all imports: 1.1 GB of data, 5.5 GB of addresses.
_LEAST = (
    (resource.RLIMIT_DATA, "ulimit -d", 1_300_000_000),
    (resource.RLIMIT_AS, "ulimit -v", 6_000_000_000),
)


@dataclass(frozen=True)
class HostMemory:
    """Bytes that can be taken without swapping, bytes of the machine, and what sets the limit.

    ``limit`` is empty where it is the machine itself.
    """

    free: int
    total: int
    limit: str = ""


def refuse_small_limits() -> None:
    """Raise UserError for a ``ulimit`` that the libraries alone exceed: they would hang in it."""
    for kind, limit, least in _LEAST:
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UserError(
                f"{limit} leaves this process {bytes_text(soft)}, and torch, transformers and "
                f"MLflow take more before anything runs: raise it to {bytes_text(least)} at least."
            )


def free_host_memory() -> int:
    """Return the bytes of anonymous memory that this process can take without swapping."""
    return host_memory().free


def host_memory() -> HostMemory:
    """Return the least of what the machine, ``ulimit``s and control groups leave this process."""
    machine = psutil.virtual_memory()
    left = [(int(machine.available), "")]
    for kind, used, limit in (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            left.append((soft - _status_bytes(used), limit))
    group = _control_groups.memory_left()
    if group is not None:
        left.append((group, "the limit on its control group"))
    free, limit = min(left)
    return HostMemory(max(0, free), int(machine.total), limit)


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
