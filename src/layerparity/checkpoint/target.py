"""Folder: where the result goes, that it is free for it, and that there is room."""

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

from layerparity.checkpoint.shards import Shard
from layerparity.checkpoint.writing import Made, writes_said
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest, write_text
from layerparity.model.checkpoint import Checkpoint

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


STATE = ".layerparity-convert.json"
# What stays in the folder once it is whole.
REPORT = "conversions.json"
SCHEMA = 1
_CHUNK = 1 << 20


@dataclass
class State:
    """A conversion's origin and its finished shards by name.

    ``source`` has, by file, size and time of change; ``layout`` is the hash of what the result will
    hold, ``config`` that of the source's config.json.
    """

    source: dict[str, list[int]]
    config: str
    dtype: str
    layout: str
    done: dict[str, Made] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Keep it in the folder of the result."""
        write_text(folder / STATE, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))

    def refuse_other(self, begun: State, folder: Path) -> None:
        """Raise UserError where ``begun``, found in the folder, is another conversion."""
        differs = _difference(self, begun)
        if differs:
            raise UserError(
                f"{folder} was begun {differs}: give another to=, or remove that folder first."
            )

    def keep_sound(self, folder: Path, begun: Mapping[str, Made], shards: Sequence[Shard]) -> None:
        """Take over the shards that an earlier call finished and that are still what it wrote."""
        for shard in shards:
            made = begun.get(shard.name)
            if made is not None and made.size == shard.bytes and _is_sound(folder, shard, made):
                self.done[shard.name] = made


def state_of(checkpoint: Checkpoint, shards: Sequence[Shard], dtype: str) -> State:
    """Return the state of a conversion that begins, from the files as their headers were read."""
    stamps = checkpoint.files.stamps
    source = {file.name: [size, changed] for file, (size, changed, _) in sorted(stamps.items())}
    layout = hashlib.sha256()
    for shard in shards:
        layout.update(shard.name.encode() + shard.header)
    config = text_digest(json.dumps(checkpoint.config, sort_keys=True))
    return State(source, config, dtype, layout.hexdigest())


def found_state(folder: Path) -> State | None:
    """Return what an earlier call left in a folder, finished or not; None where there was none.

    Raises UserError where it cannot be read.
    """
    for path in (folder / STATE, folder / REPORT):
        if path.is_file():
            return _read(path)
    return None


def _read(path: Path) -> State:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw = raw.get("origin", raw)
        if raw.pop("schema") != SCHEMA:
            raise ValueError("of another version")
        done = {name: Made(**made) for name, made in raw.pop("done").items()}
        return State(**raw, done=done)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): give another to=, or remove that folder first."
        ) from error


def origin(state: State) -> dict[str, Any]:
    """Return a state as plain values, for the report of a finished folder."""
    return {"schema": SCHEMA, **asdict(state)}


def _difference(now: State, begun: State) -> str:
    if now.dtype != begun.dtype:
        return f"with dtype={begun.dtype}, not {now.dtype}"
    apart = sorted(
        name
        for name in now.source.keys() | begun.source.keys()
        if now.source.get(name) != begun.source.get(name)
    )
    if apart:
        return f"from another checkpoint, or {apart[0]} has changed since"
    if now.config != begun.config:
        return "with another config.json"
    return "by another version of layerparity" if now.layout != begun.layout else ""


def _is_sound(folder: Path, shard: Shard, made: Made) -> bool:
    path = folder / shard.name
    if not path.is_file() or path.stat().st_size != made.size:
        return False
    return path.stat().st_mtime_ns == made.mtime_ns or _sha256(path) == made.sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while data := opened.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()
