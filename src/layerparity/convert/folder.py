"""Folder: where the result goes, that it is free for it, and that there is room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from layerparity.console import bytes_text
from layerparity.convert.resume import REPORT, STATE
from layerparity.convert.shards import Shard
from layerparity.convert.writing import writes_said
from layerparity.errors import UserError

_LOCK = ".layerparity-convert.lock"


def target_folder(to: str | None, source: Path) -> Path:
    """Return the folder that ``to=`` names. Raises UserError where nothing can be written there.

    It is new, empty, or one that an earlier call began; never the source.
    """
    if to is None:
        raise UserError("job=convert wants to=<a new folder> for the result.")
    folder = Path(to).expanduser().absolute()
    if folder.resolve() == source.resolve():
        raise UserError(f"to={to} is the checkpoint itself, which is never changed: give another.")
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise UserError(f"to={to} is a file: give a new folder.")
    if not (folder / STATE).is_file() and not (folder / REPORT).is_file():
        others = sorted(
            p.name for p in folder.iterdir() if not p.name.startswith((_LOCK, f".{STATE}"))
        )
        if others:
            raise UserError(f"to={to} holds other files ({others[0]}): give a new, empty folder.")
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make the folder and keep other commands out of it. Raises UserError where one is in it."""
    with writes_said(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(f"Another command is writing to {folder}: wait for it.") from error
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        lock.release()


def sweep_up(folder: Path, names: Sequence[str]) -> None:
    """Remove the halves of files that a killed call left."""
    for name in names:
        for part in folder.glob(f".{name}.*.part"):
            part.unlink()


def refuse_full(folder: Path, shards: Sequence[Shard], others: int) -> int:
    """Return the bytes that are still to be written. Raises UserError where they find no room."""
    need = sum(shard.bytes for shard in shards) + others
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"to={folder} still needs {bytes_text(need)} and has {bytes_text(free)}: free "
            f"{bytes_text(need - free)} there, or give another to=."
        )
    return need
