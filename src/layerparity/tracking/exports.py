"""Exports: runs that were exported elsewhere, checked and unpacked, to be read as they are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from layerparity.ground import console, progress
from layerparity.ground.errors import UserError
from layerparity.ground.files import writing
from layerparity.machine import owner
from layerparity.record.exported import FILE, ExportList, exported_runs, named_in, opened, unpack
from layerparity.record.stored_run import StoredRun
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import fetched


def open_export(path: Path, config: TrackingConfig, kind: str | None) -> list[StoredRun]:
    """Return the runs of an export, those of ``kind`` if it has any, to be read in place.

    A file is unpacked into the cache of ``config`` once, each file held against its hash; in a
    folder each is when it is read. Raises UserError for an export that is not sound.
    """
    with opened(path) as (listing, open_file), open_file(FILE) as file:
        digest = sha256(file.read()).hexdigest()
        folder = path
        if path.is_file():
            # What has these hashes is the same, wherever it came from.
            folder = fetched.folder(config.root) / "exports" / digest
            fetched.use(config.root, digest)
    if not folder.is_dir():
        with unpacked(path, config.root) as (whole, _):
            folder.parent.mkdir(parents=True, exist_ok=True)
            fetched.put(whole, folder)
        fetched.make_room(config, sum(listing.sizes.values()))
    with named_in(path, folder):
        runs = exported_runs(folder, listing)
    return [run for run in runs if run.kind == kind] or runs


@contextmanager
def unpacked(path: Path, root: Path) -> Iterator[tuple[Path, ExportList]]:
    """Yield a folder below ``root`` with the runs of an export, until the block ends."""
    cache = fetched.folder(root)
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        # What killed processes began to unpack is nobody's.
        owner.remove_abandoned(cache)
        part = Path(tempfile.mkdtemp(prefix=owner.prefix("export"), dir=cache))
    try:
        with opened(path) as (listing, _):
            free, count = shutil.disk_usage(cache).free, sum(len(run.files) for run in listing.runs)
        needed = sum(listing.sizes.values())
        if needed > free:
            need, have = console.bytes_text(needed), console.bytes_text(free)
            raise UserError(f"{path} holds {need}, and {cache} has {have} left", "free some space.")
        with progress.shown("files", count) as bar:
            yield part, unpack(path, part, bar.step)
    finally:
        shutil.rmtree(part, ignore_errors=True)
