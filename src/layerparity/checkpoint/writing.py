"""Pieces: a tensor cut into runs of rows, so that none is ever in memory as a whole."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.checkpoint.shards import ITEM_BYTES, Why
from layerparity.ground.errors import UserError
from layerparity.ground.files import whole_file
from layerparity.model.header import Stored

if TYPE_CHECKING:
    import torch

    from layerparity.checkpoint.shards import Shard, Tensor
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.filling import Filler
    from layerparity.model.loader import Pool

# Bytes of a piece, as it is read or as it is written, whichever is more.
PIECE = 16 << 20
_RAW = "U8"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that lies in one piece: where it and its scales are, and its new type.

    ``narrows``: the new type may not hold every number of it.
    """

    stored: Stored
    scales: Stored | None
    dtype: str
    block: tuple[int, int]
    narrows: bool = False

    def fill(self, filler: Filler, pool: Pool) -> torch.Tensor:
        """Return its values in the new type. Raises UserError where they do not fit into it."""
        from layerparity.checkpoint.overflow import refuse_overflow
        from layerparity.model.filling import DTYPES

        into = pool.empty(self.stored.shape, DTYPES[self.dtype])
        if self.scales is None:
            filler.fill(self.stored, into)
        else:
            filler.fill_fp8(self.stored, self.scales, self.block, into, into.dtype)
        if self.narrows:
            refuse_overflow(self, into, filler)
        return into


def pieces(tensor: Tensor, block: tuple[int, int], limit: int = PIECE) -> Iterator[Piece]:
    """Yield a tensor's pieces in their order, each of at most about ``limit`` bytes.

    FP8 weights are cut between two rows of blocks, so a piece has one such row at least.
    """
    if tensor.scales is not None:
        yield from _blocks(tensor, tensor.scales, block, limit)
        return
    stored = tensor.stored
    # What keeps its type is copied as bytes, whatever the type is.
    raw = tensor.why in (Why.AS_STORED, Why.KEPT)
    own, dtype = (_RAW, _RAW) if raw else (stored.dtype, tensor.dtype)
    item = 1 if raw else ITEM_BYTES[own]
    step = max(limit // max(item, ITEM_BYTES.get(dtype, 1)), 1)
    count, narrows = stored.bytes // item, tensor.why is Why.ROUNDED
    for start in range(0, count, step):
        part = _part(stored, own, (min(step, count - start),), start, item)
        yield Piece(part, None, dtype, block, narrows)


def _blocks(tensor: Tensor, scales: Stored, block: tuple[int, int], limit: int) -> Iterator[Piece]:
    stored = tensor.stored
    if not tensor.bytes:
        return
    rows, columns = stored.shape[-2:]
    bands, width = scales.shape[-2:]
    together = max(limit // max(block[0] * columns * ITEM_BYTES[tensor.dtype], 1), 1)
    for matrix in range(math.prod(stored.shape[:-2])):
        for band in range(0, bands, together):
            first, last = band * block[0], min((band + together) * block[0], rows)
            begin = (matrix * rows + first) * columns
            weight = _part(stored, stored.dtype, (last - first, columns), begin, 1)
            shape = (min(together, bands - band), width)
            begin, item = (matrix * bands + band) * width, ITEM_BYTES[scales.dtype]
            factors = _part(scales, scales.dtype, shape, begin, item)
            yield Piece(weight, factors, tensor.dtype, block, narrows=True)


def _part(stored: Stored, dtype: str, shape: tuple[int, ...], start: int, item: int) -> Stored:
    """Return where the numbers from ``start`` on lie, each of ``item`` bytes."""
    size, begin = math.prod(shape) * item, stored.begin + start * item
    return replace(stored, dtype=dtype, shape=shape, bytes=size, begin=begin)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Made:
    """A finished shard: its size in bytes, when it was written (ns), the SHA-256 of the file."""

    size: int
    mtime_ns: int
    sha256: str


def write_shard(folder: Path, shard: Shard, checkpoint: Checkpoint) -> Made:
    """Write one shard of the result into ``folder``.

    Raises UserError where the source cannot be read or has changed; OSError where the disk takes no
    more. The file is synced before it gets its name.
    """
    path, digest = folder / shard.name, hashlib.sha256()
    sources = {checkpoint.tensors[tensor.name].file for tensor in shard.tensors}
    sources |= {tensor.scales.file for tensor in shard.tensors if tensor.scales}
    with whole_file(path) as part:
        with part.open("wb") as opened, closing(_data(shard, checkpoint)) as parts:
            for data in parts:
                digest.update(data)
                opened.write(data)
        # What was read counts only if nobody wrote to its file meanwhile.
        for file in sorted(sources):
            checkpoint.files.check(file)
    checkpoint.files.close()
    state = path.stat()
    return Made(state.st_size, state.st_mtime_ns, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writes_said(folder: Path) -> Iterator[None]:
    """Turn what a disk refuses into a UserError with the cure."""
    try:
        yield
    except OSError as error:
        cure = "free some disk space" if error.errno in _FULL else "check the disk"
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): {cure} and give the same command "
            "again; it goes on where it stopped."
        ) from error


def _data(shard: Shard, checkpoint: Checkpoint) -> Generator[bytes | memoryview, None, None]:
    yield shard.header
    block = checkpoint.block
    yield from _read_ahead(
        (piece for tensor in shard.tensors for piece in pieces(tensor, block)), checkpoint
    )


def _read_ahead(parts: Iterable[Piece], checkpoint: Checkpoint) -> Iterator[memoryview]:
    """Yield the bytes of pieces; the next one is read while this one is hashed and written."""
    from layerparity.model.filling import Filler
    from layerparity.model.loader import Pool

    filler, pool = Filler(checkpoint.files, hashing=False), Pool()

    def filled(piece: Piece) -> memoryview:
        import torch

        raw: memoryview = piece.fill(filler, pool).view(-1).view(torch.uint8).numpy().data
        return raw

    with ThreadPoolExecutor(1, "read-ahead") as background:
        coming = None
        for piece in parts:
            before, coming = coming, background.submit(filled, piece)
            if before is not None:
                yield before.result()
                # Its pages are wanted by the piece after the next.
                del before
        if coming is not None:
            yield coming.result()
