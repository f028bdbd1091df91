"""Stored runs: a finished run opened for comparing, its manifest whole, its tensors one by one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from layerparity.errors import UserError
from layerparity.files import tensor_sha256
from layerparity.manifest import INPUTS_FILE, Manifest, Record

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open

FINISHED = "FINISHED"
MASK = "attention_mask"
WEIGHTS_FILE = "weights.json"


class RunLike(Protocol):
    """What comparing needs to know of a run: `StoredRun`, or what tracking hands over."""

    @property
    def id(self) -> str:
        """The run's id."""

    @property
    def name(self) -> str:
        """The run's name, for messages."""

    @property
    def folder(self) -> Path:
        """The folder that holds manifest, inputs and tensors, or a dump."""

    @property
    def url(self) -> str:
        """Where to look at the run; empty if nowhere."""

    @property
    def status(self) -> str:
        """FINISHED, or anything else: such a run is refused."""


@dataclass(frozen=True)
class StoredRun:
    """A run in a folder. ``names`` is a dump's name map, where it is not in the dump's folder."""

    id: str
    name: str
    folder: Path
    url: str = ""
    status: str = FINISHED
    names: Path | None = None


def stored_at(folder: Path, names: Path | None = None) -> StoredRun:
    """Return the run, or dump, that a folder holds. Raises UserError where there is no folder."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give a run's id, name or exported folder.")
    return StoredRun(str(folder), folder.resolve().name, folder, names=names)


class Source(ABC):
    """One run or dump of a side: its manifest, and its tensors one at a time.

    ``proved`` says whether fingerprints of model, inputs and weights exist. ``warnings`` are for
    the comparison.
    """

    run: RunLike
    manifest: Manifest
    proved: bool
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def load(self, record: Record) -> torch.Tensor:
        """Return a record's tensor on the CPU. Raises UserError where it is not what was stored."""

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Return bool [batch, token], true at real tokens; None where all are."""
        return None

    def tensors_used(self, stage: str) -> dict[str, str]:
        """Return the digests, by stored name, of the checkpoint's tensors that a stage used.

        Empty where the run does not say. A part of a stage, or a whole of stages, gets theirs.
        """
        return {}


class RunSource(Source):
    """A finished run's folder. Raises UserError where its manifest is missing or damaged."""

    proved = True

    def __init__(self, run: RunLike) -> None:
        self.run = run
        self.manifest = Manifest.read(Path(run.folder))

    def load(self, record: Record) -> torch.Tensor:
        """Return a tensor, mapped from its file; its bytes are checked against the manifest."""
        tensor = read_tensor(inside(Path(self.run.folder), record.file), str(record.site))
        same = tuple(tensor.shape) == record.shape and str(tensor.dtype) == f"torch.{record.dtype}"
        if not same or tensor_sha256(tensor) != record.sha256:
            raise UserError(
                f"The tensor at {record.site} of run '{self.run.name}' is damaged: its bytes are "
                "not those the manifest lists; make the run again."
            )
        return tensor

    def tensors_used(self, stage: str) -> dict[str, str]:
        """Return what weights.json lists for the stage, for what holds it and what it holds."""
        found: dict[str, str] = {}
        for name, used in self._used.items():
            if f"{name}.".startswith(f"{stage}.") or f"{stage}.".startswith(f"{name}."):
                found.update(used)
        return found

    @cached_property
    def _used(self) -> dict[str, dict[str, str]]:
        path = Path(self.run.folder) / WEIGHTS_FILE
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): make the run again.") from error

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Return the attention mask that the run was fed, as bool [batch, token]."""
        path = Path(self.run.folder) / INPUTS_FILE
        if not path.is_file() or MASK not in tensor_names(path):
            return None
        return read_tensor(path, MASK).bool()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a manifest names. Raises UserError outside its folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"The manifest in {folder} names a file outside its folder: {name}.")
    return path


def read_tensor(path: Path, key: str) -> torch.Tensor:
    """Return one tensor of a safetensors file. Raises UserError where file or tensor is missing."""
    with _opened(path) as file:
        if key not in file.keys():  # noqa: SIM118 - the handle is no mapping
            raise UserError(f"{path} holds no tensor '{key}': it is damaged; make the run again.")
        return file.get_tensor(key)


def tensor_names(path: Path) -> list[str]:
    """Return the names of a safetensors file's tensors. Raises UserError where it is damaged."""
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}).") from error
