"""Read bytes of a checkpoint's files by position, and have the system fetch what comes next.

Nothing is mapped: a file that is cut off or a disk that fails ends in words, not in a signal.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.model.header import Stamp, stamp

if TYPE_CHECKING:
    from layerparity.model.header import Stored

_AHEAD, _SEGMENT = 128 << 20, 16 << 20


class Files:
    """A checkpoint's files, each opened once for all threads; `close` gives them back.

    ``stamps`` are the files as their headers were read: a file that has changed since is refused.
    """

    def __init__(self, stamps: dict[Path, Stamp]) -> None:
        self.stamps = stamps
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            _close(self._open)

    def check(self, file: Path) -> None:
        """Raise UserError where a file is no longer what its header was read from."""
        with _damage_said(file):
            now = stamp(file.stat())
        if self.stamps.setdefault(file, now) != now:
            raise UserError(
                f"{file.name} changed while it was being used",
                "nothing that was read of it counts; make the run again.",
            )

    def read(self, file: Path, begin: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``begin`` on. Raises UserError where they end early."""
        handle = self._handle(file)
        with _damage_said(file):
            while into:
                count = os.preadv(handle, [into], begin)
                if count == 0:
                    raise UserError(f"{file.name} is cut off", "fetch it again.")
                begin, into = begin + count, into[count:]

    def advise(self, file: Path, begin: int, size: int) -> None:
        """Let the system fetch bytes that are read soon."""
        handle = self._handle(file)
        with _damage_said(file):
            os.posix_fadvise(handle, begin, size, os.POSIX_FADV_WILLNEED)

    def _handle(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self.check(file)
                with _damage_said(file):
                    self._open[file] = os.open(file, os.O_RDONLY)
                    os.posix_fadvise(self._open[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._open[file]


def _close(handles: dict[Path, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


class ReadAhead:
    """Has the system fetch what is read next, a bounded way ahead of what is being read.

    A disk gives twice as much when it knows what comes next; it gets nothing to do that is not on
    the list.
    """

    def __init__(self, files: Files, tensors: Iterable[Stored]) -> None:
        self.files = files
        listed = list(tensors)
        self._all = sum(each.bytes for each in listed)
        self._segments = _segments(listed)
        self._asked = self._read = 0
        self._lock = threading.Lock()
        self.passed(0)

    def passed(self, size: int) -> None:
        """Take note that so many bytes more were read."""
        with self._lock:
            self._read += size
            while self._asked < self._read + _AHEAD:
                segment = next(self._segments, None)
                if segment is None:
                    return
                self.files.advise(*segment)
                self._asked += segment[2]

    def __str__(self) -> str:
        return f"{bytes_text(self._read)} of {bytes_text(self._all)} read"


def _segments(tensors: Iterable[Stored]) -> Iterator[tuple[Path, int, int]]:
    for each in tensors:
        for start in range(0, each.bytes, _SEGMENT):
            yield each.file, each.begin + start, min(_SEGMENT, each.bytes - start)


@contextmanager
def _damage_said(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{file.name} cannot be read ({error.strerror})", "check the disk, or fetch it again."
        ) from error
