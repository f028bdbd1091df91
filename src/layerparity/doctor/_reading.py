"""Reading: how fast a disk gives bytes that are not in memory already."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_CHUNK = 8 << 20


def speed_of_folder(folder: Path, size: int) -> float:
    """Return bytes/s of reading ``size`` fresh bytes from a folder. Raises OSError.

    The bytes are random, written through to the disk and dropped from memory first; the file has no
    name, so nothing is left behind even by a crash.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, size, _CHUNK):
            file.write(os.urandom(min(_CHUNK, size)))
        os.fsync(file.fileno())
        return _speed(file.fileno(), 0, file.tell())


def speed_of_file(path: Path, size: int) -> float:
    """Return bytes/s of reading up to ``size`` bytes from the middle of a file."""
    with path.open("rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size
        size = min(size, whole)
        return _speed(file.fileno(), (whole - size) // 2, size)


def _speed(descriptor: int, start: int, size: int) -> float:
    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, start, os.SEEK_SET)
    buffer = memoryview(bytearray(_CHUNK))
    left, began = size, time.perf_counter()
    while left > 0:
        got = os.readv(descriptor, [buffer[: min(left, _CHUNK)]])
        if not got:
            break
        left -= got
    return (size - left) / max(time.perf_counter() - began, 1e-9)
