"""Owner: which process something belongs to, whether that is gone, and its temporary folders."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from layerparity.ground.files import text_digest

_PROC = Path("/proc")
_PID = re.compile(r"[0-9]{1,10}")
_NAME = re.compile(r"layerparity-(?:[a-z]+-)?([0-9a-f]{12})-(\d+)-([0-9a-z]+)-\w+")
# Some other process lives there, whose times another user may not read.
_HIDDEN = "hidden"


@cache
def place() -> str:
    """Return where processes have their numbers: ``host/boot/pid namespace``.

    Containers on one machine may have one host name, and each counts its processes from 1.
    """
    boot = namespace = ""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
        namespace = re.sub(r"\D", "", str((_PROC / "self/ns/pid").readlink()))
    return f"{socket.gethostname()}/{boot}/{namespace}"


def owner_tag() -> str:
    """Return ``place:pid:start`` of this process; ``start`` tells it from later ones of its pid."""
    return f"{place()}:{os.getpid()}:{start_of(os.getpid())}"


def has_ended(tag: str) -> bool | None:
    """Return whether the process of an `owner_tag` ended; None where it is not seen from here."""
    where, pid, start = tag.rsplit(":", 2)
    if where != place() or not _PID.fullmatch(pid):
        return None
    now = start_of(int(pid))
    return None if now == _HIDDEN else now != start


def start_of(pid: int) -> str:
    """Return a live process's start time in clock ticks since boot, or an empty string.

    Where there is no /proc, every live process gets one text, and so does one that is not shown.
    """
    with suppress(OSError):
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name in brackets may hold spaces and brackets itself, so count from the last one.
        state, *rest = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    shown = "alive" if not (_PROC / "self").exists() else ""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return shown or _HIDDEN
    except (OSError, OverflowError):
        return ""
    return shown


def prefix(kind: str = "") -> str:
    """Return how the name of a temporary folder of this process begins; ``kind`` is a word."""
    pid = os.getpid()
    word = f"{kind}-" if kind else ""
    return f"layerparity-{word}{text_digest(place())[:12]}-{pid}-{start_of(pid)}-"


@contextmanager
def temporary(kind: str = "") -> Iterator[str]:
    """Make a temporary folder that says in its name whose it is; remove it when the block ends."""
    folder = Path(tempfile.gettempdir()) / f"{prefix(kind)}{secrets.token_hex(4)}"
    try:
        # Not before: a signal between the two would leave it behind.
        folder.mkdir(mode=0o700)
        yield str(folder)
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            # A signal may have cut the first short.
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the temporary folders of this user's processes that are gone; return which.

    What another machine, another container or another user made is left alone.
    """
    removed = []
    with suppress(OSError):
        for path in sorted(parent.glob("layerparity-*")):
            named = _NAME.fullmatch(path.name)
            if named is None or named[1] != text_digest(place())[:12] or not _is_ours(path):
                continue
            if has_ended(f"{place()}:{named[2]}:{named[3]}"):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    """Say whether a path is a folder, no link to one, that belongs to this process's user."""
    try:
        return path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
    except OSError:
        return False
