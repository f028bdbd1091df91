"""Check the disk of the runs: its room, its speed, and whether the store on it can be used."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.console import bytes_text
from layerparity.machine.file_system import IN_MEMORY, kind_of
from layerparity.settings.tracking import read_config
from layerparity.tracking.health import describe

if TYPE_CHECKING:
    from layerparity.settings.config import Config

SAMPLE = 128 << 20
_TOO_LITTLE = 1e9
_LITTLE = 20e9
_SLOW = 100e6
_CURE = "make room, or choose another folder with tracking.folder=FOLDER"
_CHUNK = 8 << 20


def check_disk(config: Config) -> Iterator[Result]:
    """Yield a line for the room, and one for the speed, measured by a file that is removed."""
    root = read_config(config.tracking).root
    folder = root
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield problem("disk", f"{folder} is a file", "choose another with tracking.folder=FOLDER")
        return
    free = shutil.disk_usage(folder).free
    found = f"{bytes_text(free)} free at {root}"
    kind = kind_of(folder)
    if free < _TOO_LITTLE:
        yield problem("disk", found, _CURE)
        return
    if kind in IN_MEMORY:
        cure = "choose a folder on a disk with tracking.folder=FOLDER"
        yield warning("disk", f"{found}, which is memory ({kind}): runs are lost with it", cure)
    elif free < _LITTLE:
        yield warning("disk", found, _CURE)
    else:
        yield ok("disk", found)
    yield _speed_line(folder)


def _speed_line(folder: Path) -> Result:
    try:
        speed = speed_of_folder(folder, SAMPLE)
    except OSError as error:
        found = f"{folder} cannot be written to ({os.strerror(error.errno or 0)})"
        cure = "change its permissions, or choose another with tracking.folder=FOLDER"
        return problem("disk speed", found, cure)
    found = f"reads {speed / 1e9:.2f} GB/s ({bytes_text(SAMPLE)} not in memory)"
    if speed < _SLOW:
        cure = "keep runs on a local disk with tracking.folder=FOLDER"
        return warning("disk speed", f"{found}: comparisons will wait for it", cure)
    return ok("disk speed", found)


def check_store(config: Config) -> Iterator[Result]:
    """Yield one line; nothing is made. A store that cannot be used raises UserError."""
    yield ok("store", describe(config.tracking))


def speed_of_folder(folder: Path, size: int) -> float:
    """Return bytes/s of reading ``size`` fresh bytes from a folder. Raises OSError.

    The bytes are random, written through to the disk and dropped from memory first; the file has no
    name, so nothing is left behind even by a crash.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, size, _CHUNK):
            file.write(os.urandom(min(_CHUNK, size)))
        os.fsync(file.fileno())
        return _read_speed(file.fileno(), 0, file.tell())


def speed_of_file(path: Path, size: int) -> float:
    """Return bytes/s of reading up to ``size`` bytes from the middle of a file."""
    with path.open("rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size
        size = min(size, whole)
        return _read_speed(file.fileno(), (whole - size) // 2, size)


def _read_speed(descriptor: int, start: int, size: int) -> float:
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


CHECKS = (
    Check("disk", Section.MACHINE, check_disk),
    Check("store", Section.FILES, check_store),
)
