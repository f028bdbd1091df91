"""Reading: a stored tensor's bytes from its file into the memory they are meant for.

Nothing is mapped: each byte is read once, by position, into its place, and hashed on the way. What
has to change its type passes through a scratch buffer of its stored type, a few megabytes at a
time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerparity.errors import UserError
from layerparity.models import fp8
from layerparity.profile import Spent

if TYPE_CHECKING:
    from layerparity.models.checkpoint import Stored

# Read, hashed and cast while it is still in the processor's cache.
CHUNK = 4 << 20
_AHEAD, _SEGMENT = 128 << 20, 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Stamp = tuple[int, int, int]


def stamp(state: os.stat_result) -> Stamp:
    """Return what tells a file from the same file after a change: size and both times."""
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


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
                f"{file.name} changed while it was being used: nothing that was read of it counts; "
                "make the run again."
            )

    def read(self, file: Path, begin: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``begin`` on. Raises UserError where they end early."""
        handle = self._handle(file)
        with _damage_said(file):
            while into:
                count = os.preadv(handle, [into], begin)
                if count == 0:
                    raise UserError(f"{file.name} is cut off: fetch it again.")
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
        self._segments = _segments(tensors)
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
            f"{file.name} cannot be read ({error.strerror}): check the disk, or fetch it again."
        ) from error


@dataclass
class Filler:
    """Fills one tensor after the other; each thread has one of its own."""

    files: Files
    hashing: bool = True
    ahead: ReadAhead | None = None

    def __post_init__(self) -> None:
        self.spent = Spent()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, stored: Stored, into: torch.Tensor) -> str:
        """Fill ``into``, of the stored shape, cast to its type; return the stored bytes' SHA-256.

        Empty without ``hashing``.
        """
        own = DTYPES[stored.dtype]
        digest = hashlib.sha256()
        if own == into.dtype and into.is_contiguous():
            self._straight(stored, into, digest)
        elif into.is_contiguous():
            self._cast(stored, into.view(-1), own, digest)
        else:
            # A transposed place: the rows of the file lie across it.
            between = torch.empty(stored.shape, dtype=own)
            self._straight(stored, between, digest)
            with self._converting():
                into.copy_(between)
        return digest.hexdigest() if self.hashing else ""

    def fill_fp8(
        self,
        stored: Stored,
        scales: Stored,
        block: tuple[int, int],
        into: torch.Tensor,
        canonical: torch.dtype,
    ) -> str:
        """Fill ``into`` with the values of an FP8 weight; return the SHA-256 of its values.

        The hash is of the values rounded to ``canonical``, which is what a converted checkpoint
        stores. Rows go through float32 a block at a time.
        """
        factors = torch.empty(scales.shape, dtype=DTYPES[scales.dtype])
        self._straight(scales, factors, hashlib.sha256())
        if not into.is_contiguous():
            between = torch.empty(stored.shape, dtype=into.dtype)
            said = self.fill_fp8(stored, scales, block, between, canonical)
            into.copy_(between)
            return said
        digest = hashlib.sha256()
        columns = stored.shape[-1]
        rows = into.view(-1, columns)
        per_matrix, step = stored.shape[-2], block[0]
        grid = factors.reshape(-1, -(-per_matrix // step), factors.shape[-1])
        for first, count, factor in _row_blocks(rows.shape[0], per_matrix, step, grid):
            raw = self._space(count * columns)
            self._read(stored, first * columns, raw)
            with self._converting():
                part = raw.view(DTYPES[stored.dtype]).view(count, columns)
                values = fp8.dequantised(part, factor, block[1])
                rows[first : first + count].copy_(values)
                kept = values.to(canonical) if self.hashing else raw
            self._hash(digest, kept)
        return digest.hexdigest() if self.hashing else ""

    def _straight(self, stored: Stored, into: torch.Tensor, digest: Any) -> None:
        raw = into.view(-1).view(torch.uint8)
        for start in range(0, raw.numel(), CHUNK):
            part = raw[start : start + CHUNK]
            self._read(stored, start, part)
            self._hash(digest, part)

    def _cast(self, stored: Stored, into: torch.Tensor, own: torch.dtype, digest: Any) -> None:
        step = CHUNK // own.itemsize
        for start in range(0, into.numel(), step):
            part = into[start : start + step]
            raw = self._space(part.numel() * own.itemsize)
            self._read(stored, start * own.itemsize, raw)
            self._hash(digest, raw)
            with self._converting():
                part.copy_(raw.view(own))

    def _read(self, stored: Stored, start: int, raw: torch.Tensor) -> None:
        began = time.perf_counter()
        self.files.read(stored.file, stored.begin + start, _bytes(raw))
        self.spent.read += time.perf_counter() - began
        self.spent.bytes += raw.numel()
        if self.ahead is not None:
            self.ahead.passed(raw.numel())

    def _hash(self, digest: Any, raw: torch.Tensor) -> None:
        if self.hashing:
            began = time.perf_counter()
            digest.update(_bytes(raw))
            self.spent.hash += time.perf_counter() - began

    @contextmanager
    def _converting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent.convert += time.perf_counter() - began

    def _space(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]


def _row_blocks(
    rows: int, per_matrix: int, step: int, grid: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield first row, number of rows and scales of each row of blocks, matrix by matrix."""
    for matrix in range(rows // per_matrix):
        for number in range(grid.shape[1]):
            first = number * step
            count = min(step, per_matrix - first)
            yield matrix * per_matrix + first, count, grid[matrix, number]


def _bytes(tensor: torch.Tensor) -> memoryview:
    raw: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return raw
