"""Stored runs: a finished run opened for comparing, its manifest whole, its tensors one by one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from layerparity.ground.errors import UserError
from layerparity.ground.files import inside, read_tensor, tensor_digest, tensor_names
from layerparity.record.manifest import EFFECTIVE_FILE, INPUTS_FILE, Manifest, Record, WeightPrint

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.yaml"
MASK = "attention_mask"
WEIGHTS_FILE = "weights.json"


class RunLike(Protocol):
    """What comparing needs to know of a run: tracking's `StoredRun` is one."""

    @property
    def id(self) -> str:
        """The run's id; empty for a bare folder."""

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
        """How the run ended, in a word for messages."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: any other is refused."""

    @property
    def parent(self) -> str | None:
        """The id of the sweep that the run was found as a part of."""

    @property
    def tags(self) -> Mapping[str, str]:
        """What tracking knows of the run."""

    @property
    def names(self) -> Path | None:
        """A dump's name map, where it is not in the dump's folder."""


def reference(run: RunLike) -> str:
    """Return what names a run on a command line: its id, or its folder."""
    return run.id or str(run.folder)


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

    @cached_property
    def effective(self) -> dict[str, dict[str, WeightPrint]]:
        """Return the prints of the weights that each stage's graph held, by stored name, by stage.

        Empty where the run does not say.
        """
        return {}

    @cached_property
    def used(self) -> dict[str, dict[str, str]]:
        """Return the digests of the checkpoint's tensors that each stage used, by stage."""
        return {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the configuration that the run was made with; empty where it is not kept."""
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
        if not same or tensor_digest(tensor) != record.digest:
            raise UserError(
                f"The tensor at {record.site} of run '{self.run.name}' is damaged: its bytes are "
                "not those the manifest lists; make the run again."
            )
        return tensor

    def tensors_used(self, stage: str) -> dict[str, str]:
        """Return what weights.json lists for the stage, for what holds it and what it holds."""
        found: dict[str, str] = {}
        for name, used in self.used.items():
            if f"{name}.".startswith(f"{stage}.") or f"{stage}.".startswith(f"{name}."):
                found.update(used)
        return found

    @cached_property
    def effective(self) -> dict[str, dict[str, WeightPrint]]:
        """Return what effective_weights.json holds. Raises UserError where it is damaged."""
        path = Path(self.run.folder) / EFFECTIVE_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            return {
                stage: {name: WeightPrint.from_dict(each) for name, each in held.items()}
                for stage, held in raw.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}): make the run again.") from error

    @cached_property
    def used(self) -> dict[str, dict[str, str]]:
        """Return what weights.json holds. Raises UserError where it is damaged."""
        path = Path(self.run.folder) / WEIGHTS_FILE
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): make the run again.") from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return what config.yaml holds. Raises UserError where it is damaged."""
        import yaml

        path = Path(self.run.folder) / CONFIG_FILE
        try:
            return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path} is damaged ({error}): make the run again.") from error

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Return the attention mask that the run was fed, as bool [batch, token]."""
        path = Path(self.run.folder) / INPUTS_FILE
        if not path.is_file() or MASK not in tensor_names(path):
            return None
        return read_tensor(path, MASK).bool()
