"""In use: who reads a run's files holds it, so that job=gc in another process leaves it alone.

A run is one byte of one file, which a process locks (shared to read, alone to remove) until it
ends, however it ends. A file system without locks has none: then nothing is removed there.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE_NAME = "runs.lock"
_LOG = logging.getLogger(__name__)
# Hexadecimal digits of an id that number its byte: as many as an offset in a file holds.
_DIGITS = 15


@dataclass
class _LockFile:
    """The open file of one store in one process.

    It stays open: whoever closes any opening of it gives back every lock of the process.
    """

    handle: int
    process: int
    inode: int
    shared: set[str] = field(default_factory=set)


_files: dict[Path, _LockFile] = {}


def hold(root: Path, run_id: str) -> bool:
    """Hold a run of the store in a folder until this process ends; False where it is removed."""
    try:
        lock = _opened(root)
        if run_id not in lock.shared:
            _lock(lock, run_id, fcntl.LOCK_SH)
            lock.shared.add(run_id)
    except BlockingIOError:
        return False
    except OSError as error:
        _LOG.debug("No lock on run %s: %s", run_id, error)
    return True


def held(root: Path) -> frozenset[str]:
    """Return the runs of a store that this process holds."""
    lock = _files.get(root)
    mine = lock is not None and lock.process == os.getpid()
    return frozenset(lock.shared) if lock is not None and mine else frozenset()


def take(root: Path, run_id: str) -> bool:
    """Take a run for this process alone, to remove it; False where another process holds it.

    Raises OSError where the file system has no locks.
    """
    lock = _opened(root)
    try:
        _lock(lock, run_id, fcntl.LOCK_EX)
    except BlockingIOError:
        return False
    lock.shared.discard(run_id)
    return True


def release(root: Path, run_id: str) -> None:
    """Give back a run that was taken."""
    with suppress(OSError):
        _lock(_opened(root), run_id, fcntl.LOCK_UN)


def _lock(lock: _LockFile, run_id: str, how: int) -> None:
    """Lock a run's byte, or unlock it. Raises BlockingIOError where another process has it."""
    wait = 0 if how == fcntl.LOCK_UN else fcntl.LOCK_NB
    try:
        fcntl.lockf(lock.handle, how | wait, 1, int(run_id[:_DIGITS], 16))
    except PermissionError as error:
        # Some systems say so (EACCES) where others say that it would block.
        raise BlockingIOError(error.errno, error.strerror) from error


def _opened(root: Path) -> _LockFile:
    """Return the open lock file of a store; a child process, and a new store, gets its own."""
    path, lock = root / FILE_NAME, _files.get(root)
    with suppress(FileNotFoundError):
        if lock and lock.process == os.getpid() and lock.inode == path.stat().st_ino:
            return lock
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _files[root] = _LockFile(handle, os.getpid(), os.fstat(handle).st_ino)
    return _files[root]
