"""Read what a GGUF file says of itself: its keys, and where its tensors lie.

The `gguf` package parses it. A model may be split over files that are numbered.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.ground.files import refuse_pointer
from layerparity.model.header import Stamp, Stored, stamp

if TYPE_CHECKING:
    from gguf import GGUFReader

SUFFIX = ".gguf"
_ARCHITECTURE, _PARTS = "general.architecture", "split.count"
# Vocabularies are no part of a model's arithmetic, and reading one takes seconds.
_VOCABULARY, TOKEN_ID = "tokenizer.", "_token_id"
_NUMBERED = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_OF_BLOCK = re.compile(r"blk\.(\d+)\.")
# What the parser ends in where a file is cut off or damaged.
_DAMAGE = (ValueError, LookupError, ArithmeticError, TypeError, OSError)


@dataclass
class GgufFile:
    """A model's file, or its numbered parts in their order.

    ``keys`` are those of the first; ``tensors`` by name have the type as GGUF calls it and the
    shape with the longest stride first, as torch has it; ``stamps`` are by file.
    """

    keys: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    stamps: dict[Path, Stamp] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The architecture, as llama.cpp calls it."""
        return str(self.keys[_ARCHITECTURE])


def read_gguf(file: Path) -> GgufFile:
    """Read a file, or the model of which it is a part.

    Raises UserError where one is missing, cut off or damaged, and where `gguf` is not installed.
    """
    found = GgufFile()
    for part in parts_of(file):
        _read(part, found)
    if _ARCHITECTURE not in found.keys:
        raise UserError(f"{file.name} does not say its architecture", "fetch it again.")
    count = found.keys.get(_PARTS, 1)
    if count not in (0, len(found.stamps)):
        raise UserError(
            f"{file.name} says that its model has {count} files", "give it the name it had."
        )
    said = found.keys.get(f"{found.architecture}.block_count", 0)
    blocks = {int(each[1]) for each in map(_OF_BLOCK.match, found.tensors) if each}
    if isinstance(said, int) and said > max(blocks, default=-1) + 1:
        raise UserError(
            f"{file.name} says that it has {said} blocks, and holds tensors of {len(blocks)}",
            "fetch it again.",
        )
    return found


def is_gguf(path: Path) -> bool:
    """Say whether a path names a GGUF file, which may be missing."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def parts_of(file: Path) -> list[Path]:
    """Return all files of a model by the name of one of them."""
    numbered = _NUMBERED.fullmatch(file.name)
    if numbered is None:
        return [file]
    name, count = numbered["name"], numbered["count"]
    parts = [file.with_name(f"{name}-{n + 1:05}-of-{count}{SUFFIX}") for n in range(int(count))]
    return parts if file in parts else [file]


def models_in(folder: Path) -> list[Path]:
    """Return the first files of the models in a folder, by name."""
    first = {parts_of(file)[0] for file in folder.iterdir() if is_gguf(file)}
    return sorted(file for file in first if file.is_file())


def _read(file: Path, found: GgufFile) -> None:
    """Add what a file holds to what was found."""
    reader = _opened(file)
    if not found.keys:
        found.keys = {
            name: value.contents()
            for name, value in reader.fields.items()
            if not name.startswith(_VOCABULARY) or name.endswith(TOKEN_ID)
        }
    state = file.stat()
    found.stamps[file] = stamp(state)
    for each in reader.tensors:
        shape = tuple(int(size) for size in reversed(each.shape))
        place = int(each.n_bytes), int(each.data_offset)
        stored = Stored(each.name, file, each.tensor_type.name, shape, *place)
        if stored.begin + stored.bytes > state.st_size or found.tensors.get(each.name):
            raise UserError(f"{file.name} is cut off or damaged at {each.name}", "fetch it again.")
        found.tensors[each.name] = stored


def _opened(file: Path) -> GGUFReader:
    """Return the parsed file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"{file.name} is read by the package gguf, which is not installed",
            "type 'pip install gguf'.",
        ) from error
    if not file.is_file():
        raise UserError(f"No file at {file}", "give model.path=FILE.gguf.")
    if not os.access(file, os.R_OK):
        raise UserError(f"{file.name} cannot be read", "check its permissions.")
    try:
        return GGUFReader(file)
    except _DAMAGE as error:
        refuse_pointer(file)
        said = " ".join(str(error).split())[:100]
        raise UserError(
            f"{file.name} cannot be read as GGUF ({said})", "fetch it again."
        ) from error
