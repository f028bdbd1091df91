"""Progress: what an unfinished run keeps beside its tensors, so that another process can go on.

A journal has a line for each finished stage and decode step, with the hash of it and of all lines
before it. Beside it lie the tensors that the next stage needs. All of it stands in a hidden folder
of the run, which is removed when the run is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from layerparity.ground.decode import decode, encode
from layerparity.ground.files import (
    damaged,
    inside,
    read_tensors,
    reading,
    tensor_digest,
    text_digest,
    writing,
)
from layerparity.ground.parse import parse_json
from layerparity.ground.profile import StageProfile
from layerparity.record.folder import EffectiveWeights, RunFolder, UsedWeights, refuse_altered
from layerparity.record.manifest import Feed, Record
from layerparity.record.references import ReferenceEntry

_FOLDER = ".progress"
_JOURNAL = f"{_FOLDER}/journal"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Circumstances:
    """What decides a run's numbers beside its fingerprint: torch's threads, and the processor."""

    fingerprint: str
    threads: int
    processor: str


@dataclass(frozen=True)
class FinishedStage:
    """What one finished stage, or decode step, added to its run.

    ``name`` is the stage, or ``decode.N``; ``profile`` is that of all stages until then. ``state``
    and ``cache`` are the hashes of tensors by name: those that the next stage needs, and those that
    all later ones need.
    """

    name: str
    records: list[Record]
    feeds: list[Feed]
    references: list[ReferenceEntry]
    weights: dict[str, str]
    tensors_used: UsedWeights
    effective: EffectiveWeights
    skipped: dict[str, str]
    warnings: list[str]
    profile: dict[str, StageProfile]
    state: dict[str, str] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)


class ProgressWriter:
    """Writes the journal of one run, and the tensors beside it."""

    def __init__(
        self, folder: Path, circumstances: Circumstances, before: StoredProgress | None = None
    ):
        """Go on after what was written ``before``, or begin. Raises UserError; see `writing`."""
        self._folder, self._count, self._last = folder, 0, ""
        journal = folder / _JOURNAL
        with writing(journal):
            if before is None:
                shutil.rmtree(folder / _FOLDER, ignore_errors=True)
                (folder / _FOLDER).mkdir(parents=True)
                self._append(encode(circumstances))
            else:
                # A line that was cut off would hide those after it.
                os.truncate(journal, before.size)
                self._count, self._last = len(before.stages), before.digest

    def add(self, finished: FinishedStage, needed: Collection[str], tensors: Tensors) -> None:
        """Note a finished stage, with tensors of any shape on the CPU. Raises UserError.

        ``needed`` names those that the next stage needs; all later ones need the others.
        """
        files, number = RunFolder(self._folder), self._count
        state = {name: each for name, each in tensors.items() if name in needed}
        cache = {name: each for name, each in tensors.items() if name not in needed}
        for name, kept in ((_state(number), state), (_cache(number), cache)):
            if kept:
                files.write_tensors(name, kept)
        with writing(self._folder / _JOURNAL):
            self._append(
                {**encode(finished), "state": _hashes(state), "cache": _hashes(cache)},
            )
            (self._folder / _state(number - 1)).unlink(missing_ok=True)
        self._count += 1

    def _append(self, value: object) -> None:
        """Append a line and sync it: its hash, which covers the one before it, and the value."""
        text = json.dumps(value)
        self._last = text_digest(self._last + text)
        with (self._folder / _JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(f"{self._last} {text}\n")
            journal.flush()
            os.fsync(journal.fileno())


@dataclass(frozen=True)
class StoredProgress:
    """What an interrupted run had finished; ``size`` and ``digest`` are those of its journal."""

    folder: Path
    circumstances: Circumstances
    stages: list[FinishedStage]
    size: int
    digest: str

    def check(self) -> None:
        """Hold every tensor of the run against its hash. Raises UserError for the first misfit."""
        files = RunFolder(self.folder)
        for finished in self.stages:
            for record in finished.records:
                files.read_tensor(record)
            for entry in finished.references:
                _read(self.folder, entry.file, entry.hashes)
        self.state()
        for number in range(len(self.stages)):
            self.cache(number)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the next stage needs, tensors of any shape and dtype by name."""
        return _read(self.folder, _state(len(self.stages) - 1), self.stages[-1].state)

    def cache(self, number: int) -> dict[str, torch.Tensor]:
        """Return what the stage of this number put into caches, by name."""
        return _read(self.folder, _cache(number), self.stages[number].cache)


def has_progress(folder: Path) -> bool:
    """Say whether a folder holds what an interrupted run noted."""
    return (folder / _JOURNAL).is_file()


def read_progress(folder: Path) -> StoredProgress:
    """Return what an interrupted run noted; a last line that was cut off is passed over.

    Raises UserError where nothing whole was noted, or by another version.
    """
    path = inside(folder, _JOURNAL)
    size, last, lines = 0, "", []
    with reading(path):
        for line in path.read_bytes().splitlines(keepends=True):
            digest, _, text = line.decode("utf-8", "replace").partition(" ")
            if text_digest(last + text.removesuffix("\n")) != digest:
                break
            size, last = size + len(line), digest
            lines.append(parse_json(text))
        if len(lines) < 2:
            raise damaged(path, "it notes no finished stage")
        circumstances = decode(Circumstances, lines[0])
        stages = [decode(FinishedStage, line) for line in lines[1:]]
    return StoredProgress(folder, circumstances, stages, size, last)


def remove_progress(folder: Path) -> None:
    """Remove what was noted: the run is whole, or cannot be resumed."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def _state(number: int) -> str:
    return f"{_FOLDER}/state.{number}.safetensors"


def _cache(number: int) -> str:
    return f"{_FOLDER}/cache.{number}.safetensors"


def _hashes(tensors: Tensors) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def _read(folder: Path, name: str, hashes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return a file's tensors, each held against its hash and copied to memory of torch's own.

    Mapped from the file they may stand at addresses at which a sum takes another order.
    """
    if not hashes:
        return {}
    path = inside(folder, name)
    tensors = read_tensors(path, hashes)
    for key, tensor in tensors.items():
        refuse_altered(tensor, hashes[key], key, path)
    return {key: tensor.clone() for key, tensor in tensors.items()}
