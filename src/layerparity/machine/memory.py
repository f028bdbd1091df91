"""Measure the memory that this machine, a container or a limit leaves to this process.

Control groups are read by version 2 of their interface: a group is limited by every group above it,
and a container sees its own group as the root.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# What the kernel takes back from a group before it refuses it anything.
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")
_STATUS = Path("/proc/self/status")
# Measured with torch 2.9 after all imports: 1.1 GB of data, 5.5 GB of addresses.
_LEAST = (
    (resource.RLIMIT_DATA, "ulimit -d", 1_300_000_000),
    (resource.RLIMIT_AS, "ulimit -v", 6_000_000_000),
)


def memory_left() -> int | None:
    """Return the bytes that the groups leave this process, or None where none has a limit.

    What a group holds of files can be given back, and counts as free.
    """
    left = []
    for group in _groups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            counts = (line.split() for line in _read(group / "memory.stat").splitlines())
            reclaimable = sum(int(count) for name, count in counts if name in _RECLAIMED)
            left.append(max(0, int(limit) - int(used) + reclaimable))
    return min(left, default=None)


def cpus_granted() -> int | None:
    """Return the whole CPUs that the groups' quotas come to, or None where there is no quota."""
    quotas = []
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(max(1, round(int(quota) / int(period))))
    return min(quotas, default=None)


def _groups() -> list[Path]:
    """Return the folders of the groups this process is in, its own first."""
    lines = _read(OWN).splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    inside = ROOT / own.strip("/")
    return [each for each in (inside, *inside.parents) if each.is_relative_to(ROOT)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        # Not there, as in the root of a machine, or not for us to see.
        return ""


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
                f"MLflow take more before anything runs",
                f"raise it to {bytes_text(least)} at least.",
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
    group = memory_left()
    if group is not None:
        left.append((group, "the limit on its control group"))
    free, limit = min(left)
    return HostMemory(max(0, free), int(machine.total), limit)


def _status_bytes(key: str) -> int:
    """Return a figure of this process that the kernel gives in KiB; 0 where it gives none."""
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
