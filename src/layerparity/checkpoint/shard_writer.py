"""Write one shard of a converted checkpoint: read, cast, check, hash and sync its tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.checkpoint.slices import TensorSlice, slice_values, slices
from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure, whole_file

if TYPE_CHECKING:
    from layerparity.checkpoint.shards import Shard
    from layerparity.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class FinishedShard:
    """A finished shard: its size in bytes, when it was written (ns), the SHA-256 of the file."""

    size: int
    mtime_ns: int
    sha256: str


def write_shard(folder: Path, shard: Shard, checkpoint: Checkpoint) -> FinishedShard:
    """Write one shard of the result into ``folder``.

    Raises UserError where the source cannot be read or has changed; OSError where the disk takes no
    more. The file is synced before it gets its name.
    """
    path, digest = folder / shard.name, hashlib.sha256()
    sources = {file for tensor in shard.tensors for file in tensor.files}
    wanted = (each for tensor in shard.tensors for each in slices(tensor))
    with whole_file(path) as part:
        with part.open("wb") as opened, closing(_read_ahead(wanted, checkpoint)) as values:
            parts: Iterable[bytes | memoryview] = chain([shard.header], values)
            for data in parts:
                digest.update(data)
                opened.write(data)
        # What was read counts only if nobody wrote to its file meanwhile.
        for file in sorted(sources):
            checkpoint.files.check(file)
    checkpoint.files.close()
    state = path.stat()
    return FinishedShard(state.st_size, state.st_mtime_ns, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explaining_disk_errors(folder: Path) -> Iterator[None]:
    """Turn what a disk refuses into a UserError with the cure."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror})",
            f"{disk_cure(error)} and give the same command again; it goes on where it stopped.",
        ) from error


def _read_ahead(
    wanted: Iterable[TensorSlice], checkpoint: Checkpoint
) -> Generator[memoryview, None, None]:
    """Yield the bytes of slices; the next one is read while this one is hashed and written."""
    from layerparity.model.filling import Filler
    from layerparity.model.page_pool import PagePool

    filler, pool = Filler(checkpoint.files, hashing=False), PagePool()

    def bytes_of(each: TensorSlice) -> memoryview:
        import torch

        raw: memoryview = slice_values(each, filler, pool).view(-1).view(torch.uint8).numpy().data
        return raw

    with ThreadPoolExecutor(1, "read-ahead") as background:
        coming = None
        for each in wanted:
            before, coming = coming, background.submit(bytes_of, each)
            if before is not None:
                yield before.result()
                # Its pages are wanted by the slice after the next.
                del before
        if coming is not None:
            yield coming.result()
