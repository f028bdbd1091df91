"""References on disk: write and read the wider values at a golden run's sites, and the floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from layerparity.anatomy.site import Site
from layerparity.ground.decode import decode, encode, json_lines
from layerparity.ground.files import (
    TensorFiles,
    damaged,
    reading,
    tensor_digest,
    text_digest,
)
from layerparity.ground.parse import parse_json
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.floor import OFF, Floor
from layerparity.numbers.typical_floor import TypicalFloor
from layerparity.record.folder import (
    REFERENCE_INDEX,
    REFERENCE_STATES,
    RunFolder,
    reference_file,
    refuse_altered,
)

ISOLATED, CHAINED = "isolated", "chained"


@dataclass(frozen=True)
class StoredFloor:
    """What the index says of a floor: the names of the clean ways, and the numbers of `Floor`."""

    ways: tuple[str, ...]
    slopes: dict[str, SlopeSample] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    golden_shares: tuple[float, ...] = ()
    freedom: float | None = None


@dataclass(frozen=True)
class ReferenceEntry:
    """One site's reference: the stage and feed it was computed in, its file, and the floors there.

    ``hashes`` are the hash of each tensor by its name in the file; ``floors`` are by floating type.
    ``steps`` are the decode steps that were evaluated as one pass, isolated, whose values are
    stored together, named after the first; ``site`` is that of one of them. The prefill has none.
    """

    site: Site
    stage: str
    feed: str
    file: str
    hashes: dict[str, str]
    floors: dict[str, StoredFloor] = field(default_factory=dict)
    steps: tuple[int, ...] = ()

    @property
    def sites(self) -> list[Site]:
        """The site at each of its decode steps, or in the prefill."""
        return [self.site.at_step(step) for step in self.steps] or [self.site]

    @property
    def row(self) -> int:
        """Where its own decode step stands among all of them."""
        return self.steps.index(self.site.step)

    def name(self, dtype: str = "", part: str = "") -> str:
        """Return the name in the file of its values, or of a tensor of a floor, as ``tokens``."""
        first = str(self.site.at_step(self.steps[0]) if self.steps else self.site)
        return " ".join([first, dtype, part] if part else [first])


@dataclass(frozen=True)
class _Index:
    """The index file; ``states`` are the hashes of what each chained way put out last, by way."""

    entries: list[ReferenceEntry]
    states: dict[str, str] = field(default_factory=dict)


class ReferenceWriter:
    """Writes references, a file for each stage and feed, and an index at the end."""

    def __init__(self, folder: Path) -> None:
        self._files = RunFolder(folder)
        self.entries: list[ReferenceEntry] = []
        self._states: dict[str, str] = {}

    def write_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Store what each chained way put out last, floating [batch, token, channel], by way."""
        self._states = {name: tensor_digest(state) for name, state in states.items()}
        self._files.write_tensors(REFERENCE_STATES, states)

    def write(
        self,
        stage: str,
        feed: str,
        name: str,
        references: dict[Site, tuple[torch.Tensor, dict[str, Floor]]],
        steps: Sequence[int] = (),
    ) -> None:
        """Store the references of one stage's sites, each with its floors by floating type.

        Tensors are float32 or float64 in the shape of their site. With ``steps`` they are of these
        decode steps, [batch, step, ...], floors have the steps in front, and sites are those of the
        first step. Raises UserError where the disk refuses.
        """
        relative = reference_file(name, feed)
        everything: dict[str, torch.Tensor] = {}
        for site, (reference, floors) in references.items():
            kept = {
                dtype: StoredFloor(
                    each.ways,
                    each.slopes,
                    each.factors,
                    each.ends,
                    each.golden_shares,
                    each.freedom,
                )
                for dtype, each in floors.items()
            }
            entry = ReferenceEntry(site, stage, feed, relative, {}, kept, tuple(steps))
            tensors = {entry.name(): reference.contiguous()}
            for dtype, floor in floors.items():
                for part, tensor in floor.tensors().items():
                    tensors[entry.name(dtype, part)] = tensor.contiguous()
            entry.hashes.update({key: tensor_digest(tensor) for key, tensor in tensors.items()})
            self.entries.append(entry)
            everything |= tensors
        if everything:
            self._files.write_tensors(relative, everything)

    def off(self) -> dict[Site, float]:
        """Return how far the golden is off its reference, where that is too far; see `Floor`."""
        return {
            entry.site: share
            for entry in self.entries
            for floor in entry.floors.values()
            if (share := max(floor.golden_shares, default=0.0)) > OFF
            # As it is fed what the golden recorded, and not by its own chain.
            and entry.feed == ISOLATED
            and entry.stage == str(entry.site.place.stage)
        }

    def finish(self) -> str:
        """Write the index; return its hash, which the manifest keeps."""
        return self._files.write_text(
            REFERENCE_INDEX, json_lines(encode(_Index(self.entries, self._states)))
        )


class StoredReferences:
    """The references of a finished run, read lazily.

    A site's take several tensors, and those of many decode steps lie in one: small files are opened
    once for many of them, and each tensor is held against its hash when it is first read.
    """

    def __init__(self, files: RunFolder, digest: str) -> None:
        """Raises UserError where the index is damaged or not the one the manifest names."""
        self.digest = digest
        self._files = TensorFiles(files.locate_tensor)
        self._right: set[tuple[str, str]] = set()
        self._entries: dict[tuple[str, str, Site], ReferenceEntry] = {}
        self._steps: dict[tuple[str, ...], list[ReferenceEntry]] = {}
        path = files.locate_file(REFERENCE_INDEX)
        with reading(path):
            text = path.read_text(encoding="utf-8")
            if text_digest(text) != digest:
                raise damaged(path, "it is not what the manifest names")
            index = decode(_Index, parse_json(text))
        self._all, self._states = index.entries, index.states
        for entry in index.entries:
            for site in entry.sites:
                self._entries[entry.stage, entry.feed, site] = entry
            self._steps.setdefault(_place(entry), []).append(entry)

    def states(self) -> dict[str, torch.Tensor]:
        """Return what each chained way put out last, [batch, token, channel], by way.

        Empty where the run is no part of a chain that goes on. Raises UserError for damage.
        """
        found = {}
        for name, digest in self._states.items():
            path, found[name] = self._files.read(REFERENCE_STATES, name)
            refuse_altered(found[name], digest, name, path)
        return found

    def find(self, stage: str, feed: str, site: Site) -> ReferenceEntry | None:
        """Return the entry of a site as one stage computed it, or None."""
        entry = self._entries.get((stage, feed, site))
        return replace(entry, site=site) if entry is not None and entry.steps else entry

    def entries(self) -> list[ReferenceEntry]:
        """Return every entry once; of several decode steps, at the first."""
        return list(self._all)

    def reference(self, entry: ReferenceEntry) -> torch.Tensor:
        """Return the values one precision wider, float32 or float64, in the shape of the site."""
        values = self._read(entry, entry.name(), 1)
        return values.narrow(1, entry.row, 1).contiguous() if entry.steps else values

    def floor(self, entry: ReferenceEntry, dtype: str) -> Floor | None:
        """Return the floor in a floating type, or None where none was made."""
        stored = entry.floors.get(dtype)
        if stored is None:
            return None
        tokens = self._read(entry, entry.name(dtype, "tokens"))
        elements = self._read(entry, entry.name(dtype, "elements"))
        name = entry.name(dtype, "weighed")
        weighed = self._read(entry, name) if name in entry.hashes else None
        floor = Floor(
            stored.ways,
            tokens,
            elements,
            dict(stored.slopes),
            None,
            weighed,
            dict(stored.factors),
            dict(stored.ends),
            stored.golden_shares,
            stored.freedom,
        )
        return floor.of_pass(entry.row) if entry.steps else floor

    def golden_share(self, entry: ReferenceEntry, dtype: str) -> float:
        """Return how far the golden itself is off at a site; see `Floor`; 0 where none is known."""
        stored = entry.floors[dtype]
        if not stored.golden_shares:
            return 0.0
        return stored.golden_shares[entry.row if entry.steps else 0]

    def steps(
        self, entries: Sequence[ReferenceEntry], dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return values and floors of decode steps that are stored together, of one sequence.

        Values are float32 or float64 [step, element], the floors' ``tokens`` float64 [step, way],
        their ``elements`` [step, way, element]; see `Floor`. Raises UserError where they are
        damaged.
        """
        first, rows = entries[0], torch.tensor([entry.row for entry in entries])
        values = self._read(first, first.name(), 1).index_select(1, rows)
        tokens, elements = (
            self._read(first, first.name(dtype, part)).index_select(0, rows)
            for part in ("tokens", "elements")
        )
        return values.reshape(len(entries), -1), tokens.flatten(1), elements

    def typical_floor(self, entry: ReferenceEntry, dtype: str) -> TypicalFloor | None:
        """Return one token's floor at a site, pooled over prefill and decode steps; or None."""
        names = [(each, each.name(dtype, "real")) for each in self._steps[_place(entry)]]
        errors = [self._read(each, name) for each, name in names if name in each.hashes]
        # Of several steps the steps are in front.
        rows = [each.transpose(0, -2).flatten(1) for each in errors]
        return TypicalFloor.of(*torch.cat(rows, 1)) if rows else None

    def _read(self, entry: ReferenceEntry, name: str, axis: int = 0) -> torch.Tensor:
        """Return a tensor of any shape whose decode steps, where it has any, lie on an axis."""
        path, tensor = self._files.read(entry.file, name)
        if (entry.file, name) not in self._right:
            refuse_altered(tensor, entry.hashes[name], name, path)
            self._right.add((entry.file, name))
        if entry.steps and tensor.shape[axis : axis + 1] != (len(entry.steps),):
            raise damaged(path, f"{name} is not of {len(entry.steps)} decode steps")
        return tensor


def _place(entry: ReferenceEntry) -> tuple[str, ...]:
    """Return what an entry has in common with those of other steps."""
    return (entry.stage, entry.feed, entry.site.path, entry.site.end)
