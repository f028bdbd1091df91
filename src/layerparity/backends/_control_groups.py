"""Control groups: what a container, or a limit on a service, leaves a process of a machine.

Version 2 of the interface. A group is limited by every group above it, and a container sees its own
group as the root.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# What the kernel takes back from a group before it refuses it anything.
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")


def memory_left() -> int | None:
    """Return the bytes that the groups leave this process, or None where none has a limit.

    What a group holds of files can be given back, and counts as free.
    """
    left = []
    for group in _groups():
        limit, held = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and held.isdigit():
            left.append(max(0, int(limit) - int(held) + _reclaimable(group)))
    return min(left, default=None)


def cpus_granted() -> int | None:
    """Return the whole CPUs that the groups' quotas come to, or None where there is no quota."""
    granted = []
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            granted.append(max(1, round(int(quota) / int(period))))
    return min(granted, default=None)


def _groups() -> list[Path]:
    """Return the folders of the groups this process is in, its own first."""
    lines = _read(OWN).splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    inside = ROOT / own.strip("/")
    return [each for each in (inside, *inside.parents) if each.is_relative_to(ROOT)]


def _reclaimable(group: Path) -> int:
    words = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(count) for name, count in words if name in _RECLAIMED)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        # Not there, as in the root of a machine, or not for us to see.
        return ""
