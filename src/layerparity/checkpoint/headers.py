"""Read a safetensors header, damaged or not, and list every way in which it cannot be true.

`model/checkpoint.py` refuses a file at its first fault; here a damaged file still gives all the
tensors that can be made out.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerparity.checkpoint.finding import AuditFinding, counted
from layerparity.ground.files import is_pointer
from layerparity.model.header import Stored, bytes_due

_PREFIX = 8
_LIMIT = 100 * 2**20


@dataclass
class ShardHeader:
    """A file, its size in bytes, and the tensors that its header lists.

    ``readable`` is False where the header could not be made out at all.
    """

    file: Path
    size: int = 0
    tensors: list[Stored] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    readable: bool = True

    def add(self, what: str, text: str, tensor: str = "", count: int = 1) -> None:
        """Note a problem of this file."""
        self.findings.append(AuditFinding(what, text, tensor, self.file.name, count))


def intact(stored: Stored, size: int) -> bool:
    """Say whether a tensor's bytes are all in a file of ``size`` bytes, as many as they must be."""
    return stored.bytes == bytes_due(stored) and stored.begin + stored.bytes <= size


def read_shard_header(file: Path) -> ShardHeader:
    """Read a file's header; nothing is raised for what is wrong with it."""
    shard = ShardHeader(file)
    try:
        with file.open("rb") as opened:
            shard.size = os.fstat(opened.fileno()).st_size
            prefix = opened.read(_PREFIX)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX else -1
            raw = opened.read(length) if 0 <= length <= min(_LIMIT, shard.size) else b""
    except OSError as error:
        shard.add("shard_unreadable", f"{file.name} cannot be read ({error.strerror})")
        shard.readable = False
        return shard
    if len(raw) == length:
        _entries(shard, raw)
    elif 0 <= length <= _LIMIT or shard.size < _PREFIX:
        shard.readable = False
        text = f"{file.name} is cut off inside its header: it is {shard.size} bytes"
        shard.add("shard_truncated", text)
    elif is_pointer(file):
        shard.readable = False
        shard.add("not_fetched", f"{file.name} is a pointer of Git LFS, and not the file itself")
    else:
        shard.readable = False
        text = f"{file.name} is not a safetensors file: it does not begin as one"
        shard.add("header_damaged", text)
    if shard.readable:
        _tiling(shard, _PREFIX + length)
    return shard


class _JsonObject(list[tuple[str, Any]]):
    """A JSON object as its pairs, for a key may come twice."""


def _entries(shard: ShardHeader, raw: bytes) -> None:
    """Take down every entry of the header that can be made out."""
    try:
        header = json.loads(raw, object_pairs_hook=_JsonObject)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, _JsonObject):
        shard.readable = False
        shard.add("header_damaged", f"{shard.file.name} has a header that is no JSON object")
        return
    start, seen = _PREFIX + len(raw), set()
    for name, entry in header:
        if name == "__metadata__":
            continue
        if name in seen:
            shard.add("tensor_twice", f"{name} stands twice in {shard.file.name}", name)
            continue
        seen.add(name)
        stored = _stored(shard.file, start, name, entry)
        if stored is None:
            text = f"{name} has no readable dtype, shape and offsets in {shard.file.name}"
            shard.add("entry_damaged", text, name)
        else:
            shard.tensors.append(stored)


def _stored(file: Path, start: int, name: str, entry: Any) -> Stored | None:
    """Return where an entry says that a tensor lies; None where it makes no sense."""
    if not isinstance(entry, _JsonObject):
        return None
    values = dict(entry)
    try:
        begin, end = values["data_offsets"]
        dtype, shape = values["dtype"], tuple(values["shape"])
    except (KeyError, TypeError, ValueError):
        return None
    numbers = (begin, end, *shape)
    # A boolean is an int to Python, and no size.
    if {type(each) for each in numbers} != {int} or not isinstance(dtype, str):
        return None
    if min(numbers) < 0 or end < begin:
        return None
    return Stored(name, file, dtype, shape, end - begin, start + begin)


def _tiling(shard: ShardHeader, position: int) -> None:
    """Hold sizes against shapes, and places against each other and against the file's end."""
    for each in shard.tensors:
        due = bytes_due(each)
        if due is None:
            shard.add("type_unread", f"{each.name} has the unknown dtype {each.dtype}", each.name)
        elif due != each.bytes:
            text = f"{each.name} has {each.bytes} bytes; {each.dtype} {list(each.shape)} is {due}"
            shard.add("size_wrong", text, each.name)
    end, tiled = position, True
    for each in sorted(shard.tensors, key=lambda stored: (stored.begin, stored.bytes)):
        if each.begin != end:
            tiled = False
            fault = "offsets_overlap" if each.begin < end else "offsets_gap"
            text = f"{each.name} begins at byte {each.begin}, what is before it ends at {end}"
            shard.add(fault, text, each.name)
        end = max(end, each.begin + each.bytes)
    if end > shard.size:
        _past_the_end(shard, end, tiled)
    elif end < shard.size and not any(f.what == "entry_damaged" for f in shard.findings):
        text = f"{shard.file.name} is {shard.size} bytes, its header describes {end}"
        shard.add("bytes_left_over", text, count=0)


def _past_the_end(shard: ShardHeader, end: int, tiled: bool) -> None:
    """Note which tensors a file is too short for: all after a cut, or those with wrong offsets."""
    beyond = [each for each in shard.tensors if each.begin + each.bytes > shard.size]
    if tiled:
        first = min(beyond, key=lambda stored: stored.begin)
        text = (
            f"{shard.file.name} is {shard.size} bytes, its header describes {end}: "
            f"{counted(len(beyond), 'tensor')} cut off, {first.name} first"
        )
        shard.add("shard_truncated", text, count=len(beyond))
        return
    for each in beyond:
        text = f"{each.name} ends at byte {each.begin + each.bytes}, the file at {shard.size}"
        shard.add("offsets_beyond_end", text, each.name)
