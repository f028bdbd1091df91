"""Stored references: the wide values of a golden run's sites and their floors, on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.ground.files import (
    inside,
    read_tensors,
    tensor_digest,
    text_digest,
    whole_file,
    write_text,
)
from layerparity.numbers.floor import Floor
from layerparity.numbers.typical_floor import TypicalFloor

FOLDER = "reference"
INDEX = f"{FOLDER}/index.json"
SCHEMA = 2
ISOLATED, CHAINED = "isolated", "chained"


@dataclass(frozen=True)
class Entry:
    """One site's reference: the stage and feed it was computed in, its file, and the floors there.

    ``hashes`` are the hash of each tensor by its name in the file; ``floors`` gives by floating
    type the names of the ways and the spread of their slopes.
    """

    site: Site
    stage: str
    feed: str
    file: str
    hashes: dict[str, str]
    floors: dict[str, dict[str, Any]] = field(default_factory=dict)


class ReferenceWriter:
    """Writes references, a file for each stage and feed, and an index at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []

    def write(
        self,
        stage: str,
        feed: str,
        name: str,
        found: dict[Site, tuple[torch.Tensor, dict[str, Floor]]],
    ) -> None:
        """Store the references of one stage's sites, each with its floors by floating type."""
        from safetensors.torch import save_file

        relative = f"{FOLDER}/{name}.{feed}.safetensors"
        everything: dict[str, torch.Tensor] = {}
        for site, (reference, floors) in found.items():
            tensors = {_reference(site): reference.contiguous()}
            for dtype, floor in floors.items():
                tensors[_tokens(site, dtype)] = floor.tokens.contiguous()
                tensors[_elements(site, dtype)] = floor.elements.contiguous()
                if floor.real is not None:
                    tensors[_real(site, dtype)] = floor.real.contiguous()
            hashes = {key: tensor_digest(tensor) for key, tensor in tensors.items()}
            kept = {d: {"ways": list(f.ways), "spread": f.spread} for d, f in floors.items()}
            self.entries.append(Entry(site, stage, feed, relative, hashes, kept))
            everything |= tensors
        if everything:
            with whole_file(self.folder / relative) as part:
                save_file(everything, part)

    def finish(self) -> str:
        """Write the index; return its hash, which the manifest keeps."""
        rows = [{**asdict(entry), "site": str(entry.site)} for entry in self.entries]
        text = json.dumps({"schema": SCHEMA, "entries": rows}, indent=1)
        write_text(self.folder / INDEX, text)
        return text_digest(text)


class StoredReferences:
    """The references of a finished run, read lazily."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Raises UserError where the index is damaged or not the one the manifest names."""
        self.folder = folder
        self._entries: dict[tuple[str, str, Site], Entry] = {}
        self._steps: dict[tuple[str, ...], list[Entry]] = {}
        path = folder / INDEX
        try:
            text = path.read_text(encoding="utf-8")
            raw = json.loads(text)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): make the golden again.") from error
        if text_digest(text) != digest or raw.get("schema") != SCHEMA:
            raise UserError(f"{path} is not what the run's manifest names: make the golden again.")
        for row in raw["entries"]:
            entry = Entry(**{**row, "site": Site.parse(row["site"])})
            self._entries[entry.stage, entry.feed, entry.site] = entry
            self._steps.setdefault(_place(entry), []).append(entry)

    def find(self, stage: str, feed: str, site: Site) -> Entry | None:
        """Return the entry of a site as one stage computed it, or None."""
        return self._entries.get((stage, feed, site))

    def entries(self) -> list[Entry]:
        """Return every entry."""
        return list(self._entries.values())

    def reference(self, entry: Entry) -> torch.Tensor:
        """Return the wide values, in the shape of the site's own tensor."""
        return self._read(entry, _reference(entry.site))

    def floor(self, entry: Entry, dtype: str) -> Floor | None:
        """Return the floor in a floating type, or None where none was made."""
        kept = entry.floors.get(dtype)
        if kept is None:
            return None
        tokens = self._read(entry, _tokens(entry.site, dtype))
        elements = self._read(entry, _elements(entry.site, dtype))
        return Floor(tuple(kept["ways"]), tokens, elements, dict(kept["spread"]))

    def typical_floor(self, entry: Entry, dtype: str) -> TypicalFloor | None:
        """Return one token's floor at a site, pooled over prefill and decode steps; or None."""
        named = [(each, _real(each.site, dtype)) for each in self._steps[_place(entry)]]
        found = [self._read(each, name) for each, name in named if name in each.hashes]
        return TypicalFloor.of(*torch.cat(found, 1)) if found else None

    def _read(self, entry: Entry, name: str) -> torch.Tensor:
        path = inside(self.folder, entry.file)
        tensor = read_tensors(path, [name], "make the golden again")[name]
        if tensor_digest(tensor) != entry.hashes[name]:
            raise UserError(f"{path} was altered at {name}: make the golden again.")
        return tensor


def _place(entry: Entry) -> tuple[str, ...]:
    """Return what an entry has in common with those of other steps."""
    return (entry.stage, entry.feed, entry.site.path, entry.site.end)


def _reference(site: Site) -> str:
    return str(site)


def _tokens(site: Site, dtype: str) -> str:
    return f"{site} {dtype} tokens"


def _elements(site: Site, dtype: str) -> str:
    return f"{site} {dtype} elements"


def _real(site: Site, dtype: str) -> str:
    return f"{site} {dtype} real"
