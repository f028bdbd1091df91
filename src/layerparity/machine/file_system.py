"""File systems: what kind a folder is on, and what that means for a database."""

from __future__ import annotations

from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
# Their machines do not share memory, which sqlite's write-ahead log needs.
_NETWORK = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre"),
    *("orangefs", "panfs", "pvfs2", "virtiofs", "wekafs"),
)
_NETWORK_BEGINS = ("nfs", "smb", "fuse.", "fuseblk.", "ocfs")


def kind_of(folder: Path) -> str:
    """Return the kind of file system a folder is on, as the kernel calls it; empty if unknown."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    inside = [part for part in mounts if folder.is_relative_to(part.mountpoint)]
    return max(inside, key=lambda part: len(part.mountpoint)).fstype if inside else ""


def is_network(kind: str) -> bool:
    """Say whether several machines may have a file system of this kind open at once."""
    return kind in _NETWORK or kind.startswith(_NETWORK_BEGINS)
