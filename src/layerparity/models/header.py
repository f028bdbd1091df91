"""Header: what a safetensors file says of its tensors, and whether that can be true."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerparity.errors import UserError

_HEADER_LIMIT = 100 * 2**20
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

    ``begin`` is the position of its first byte in the file.
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


def read_header(file: Path) -> list[Stored]:
    """Return what a safetensors file's header lists. Raises UserError where it cannot be true."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size):
            raise UserError(
                f"{file.name} is not a safetensors file, or is cut off: fetch it again."
            )
        raw = opened.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        stored = [_stored(file, 8 + length, name, entry) for name, entry in header.items()]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file.name} has a damaged header: fetch it again.") from error
    if not _tiled(stored, 8 + length):
        raise UserError(
            f"{file.name} has a header that lies about where its tensors are: fetch it again."
        )
    if 8 + length + end != size:
        raise UserError(
            f"{file.name} is {size} bytes but its header describes {8 + length + end}: "
            "it is cut off or damaged; fetch it again."
        )
    return stored


def _tiled(stored: list[Stored], position: int) -> bool:
    """Say whether tensors lie one after the other, each as long as its shape and dtype say."""
    for each in sorted(stored, key=lambda each: (each.begin, each.bytes)):
        true = bytes_due(each) in (None, each.bytes)
        if each.begin != position or each.bytes < 0 or not true:
            return False
        position += each.bytes
    return True


def _stored(file: Path, start: int, name: str, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return Stored(name, file, entry["dtype"], shape, end - begin, start + begin)
