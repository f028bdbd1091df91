"""Prepare a conversion's folder: refuse what it may not overwrite, go on where one stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from layerparity.checkpoint.shard_writer import FinishedShard, explaining_disk_errors
from layerparity.checkpoint.shards import Shard
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.files import damaged, expanded, text_digest, write_text
from layerparity.ground.parse import parse_json
from layerparity.model.checkpoint import Checkpoint

STATE = ".layerparity-convert.json"
# What stays in the folder once it is whole.
REPORT = "conversions.json"
SCHEMA = 1
_LOCK = ".layerparity-convert.lock"


def target_folder(to: str | None, source: Path) -> Path:
    """Return the folder that ``to=`` names. Raises UserError where nothing can be written there.

    It is new, empty, or one that an earlier call began; never the source.
    """
    if to is None:
        raise UserError("job=convert wants to=<a new folder> for the result.")
    folder = expanded(to).absolute()
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
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other commands out of it. Raises UserError where one is in it."""
    with explaining_disk_errors(folder):
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


@dataclass
class ConversionState:
    """A conversion's origin and its finished shards by name.

    ``source`` has, by file, size and time of change; ``layout`` is the hash of what the result will
    hold, ``config`` that of the source's config.json.
    """

    source: dict[str, list[int]]
    config: str
    dtype: str
    layout: str
    done: dict[str, FinishedShard] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, folder: Path) -> None:
        """Keep it in the folder of the result."""
        write_text(folder / STATE, json.dumps(self.to_dict(), indent=1))

    def refuse_other(self, begun: ConversionState, folder: Path) -> None:
        """Raise UserError where ``begun``, found in the folder, is another conversion."""
        difference = self._difference(begun)
        if difference:
            raise UserError(
                f"{folder} was begun {difference}: give another to=, or remove that folder first."
            )

    def _difference(self, begun: ConversionState) -> str:
        if self.dtype != begun.dtype:
            return f"with dtype={begun.dtype}, not {self.dtype}"
        names = sorted(self.source.keys() | begun.source.keys())
        changed = [name for name in names if self.source.get(name) != begun.source.get(name)]
        if changed:
            return f"from another checkpoint, or {changed[0]} has changed since"
        if self.config != begun.config:
            return "with another config.json"
        return "by another version of layerparity" if self.layout != begun.layout else ""

    def keep_sound(
        self, folder: Path, begun: Mapping[str, FinishedShard], shards: Sequence[Shard]
    ) -> None:
        """Take over the shards that an earlier call finished and that are still what it wrote."""
        for shard in shards:
            finished = begun.get(shard.name)
            alike = finished is not None and finished.size == shard.bytes
            if finished and alike and _is_sound(folder / shard.name, finished):
                self.done[shard.name] = finished


def state_of(checkpoint: Checkpoint, shards: Sequence[Shard], dtype: str) -> ConversionState:
    """Return the state of a conversion that begins, from the files as their headers were read."""
    stamps = checkpoint.files.stamps
    source = {file.name: [size, changed] for file, (size, changed, _) in sorted(stamps.items())}
    layout = hashlib.sha256()
    for shard in shards:
        layout.update(shard.name.encode() + shard.header)
    said = [checkpoint.config, *([checkpoint.adapter.settings] if checkpoint.adapter else [])]
    config = text_digest("".join(json.dumps(each, sort_keys=True) for each in said))
    return ConversionState(source, config, dtype, layout.hexdigest())


def read_state(folder: Path) -> ConversionState | None:
    """Return what an earlier call left in a folder, finished or not; None where there was none.

    Raises UserError where it cannot be read.
    """
    path = next((p for p in (folder / STATE, folder / REPORT) if p.is_file()), None)
    if path is None:
        return None
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        raw = raw.get("origin", raw)
        if raw.pop("schema") != SCHEMA:
            raise ValueError("of another version")
        done = {name: FinishedShard(**each) for name, each in raw.pop("done").items()}
        return ConversionState(**raw, done=done)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error, "give another to=, or remove that folder first") from error


def _is_sound(path: Path, finished: FinishedShard) -> bool:
    """Say whether a file is still what was written; it is read where its time of change differs."""
    if not path.is_file() or path.stat().st_size != finished.size:
        return False
    if path.stat().st_mtime_ns == finished.mtime_ns:
        return True
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == finished.sha256
