"""Read a safetensors file's header, and refuse one that cannot be true."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.ground.files import refuse_pointer

_HEADER_LIMIT = 100 * 2**20
Stamp = tuple[int, int, int]
# Bits of one number, by safetensors' name of its type: all that it knows, the last ones packed.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Stored:
    """Where one tensor of a checkpoint lies: file, dtype as safetensors names it, shape, bytes.

    ``begin`` is the position, in bytes, of its first byte in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    begin: int = 0


def bytes_due(stored: Stored) -> int | None:
    """Return the bytes that shape and dtype ask for; None for a dtype nobody knows."""
    bits = BITS.get(stored.dtype)
    return None if bits is None else (bits * math.prod(stored.shape) + 7) // 8


@dataclass(frozen=True)
class Header:
    """A file's tensors, and what tells the file from the same one after a change."""

    file: Path
    stamp: Stamp
    tensors: list[Stored] = field(default_factory=list)


def stamp(state: os.stat_result) -> Stamp:
    """Return what tells a file from the same file after a change: size and both times."""
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def read_header(file: Path) -> Header:
    """Return what a safetensors file's header lists. Raises UserError where it cannot be true."""
    try:
        with file.open("rb") as opened:
            marked = stamp(os.fstat(opened.fileno()))
            prefix = opened.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
            raw = opened.read(length) if length <= min(_HEADER_LIMIT, marked[0]) else None
    except OSError as error:
        raise UserError(
            f"{file.name} cannot be read ({error.strerror})", "check the disk, or fetch it again."
        ) from error
    if raw is None or len(raw) != length:
        refuse_pointer(file)
        raise UserError(f"{file.name} is not a safetensors file, or is cut off", "fetch it again.")
    return Header(file, marked, list(_listed(file, raw, marked[0])))


# Each part of a sweep opens its checkpoint, and reading what 48,000 lines say takes a second.
@lru_cache(maxsize=256)
def _listed(file: Path, raw: bytes, size: int) -> list[Stored]:
    start = 8 + len(raw)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [_stored(file, start, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file.name} has a damaged header", "fetch it again.") from error
    end = start
    # Tensors lie one after the other, each as long as its shape and dtype say.
    for each in sorted(tensors, key=lambda each: (each.begin, each.bytes)):
        is_due = bytes_due(each) in (None, each.bytes)
        if each.begin != end or each.bytes < 0 or not is_due:
            raise UserError(
                f"{file.name} has a header that lies about where its tensors are", "fetch it again."
            )
        end += each.bytes
    if end != size:
        raise UserError(
            f"{file.name} is {size} bytes but its header describes {end}",
            "it is cut off or damaged; fetch it again.",
        )
    return tensors


def _stored(file: Path, start: int, name: str, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    # In Python True is a number, and so is 1.0; in a header neither is.
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise ValueError(name)
    return Stored(name, file, dtype, shape, end - begin, start + begin)
