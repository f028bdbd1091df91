"""Source: one run or dump of a side, its manifest whole, its tensors one by one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from layerparity.anatomy.site import overlap
from layerparity.ground.files import TensorFiles
from layerparity.record.findings import Caution
from layerparity.record.folder import EffectiveWeights, UsedWeights, checked_tensor
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.manifest import Manifest, Record
from layerparity.record.stored_run import MANIFEST_TAG, StoredRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from layerparity.anatomy.site import Site


class Source(ABC):
    """One run or dump of a side: its manifest, and its tensors one at a time.

    ``proved`` says whether fingerprints of model, inputs and weights exist. ``cautions`` are for
    the comparison.
    """

    run: StoredRun
    manifest: Manifest
    proved: bool
    cautions: tuple[Caution, ...] = ()
    _stored: Mapping[tuple[Site, str], Record] | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What it was computed in; of a dump, what it holds."""
        return (self.manifest.dtype,)

    @abstractmethod
    def read(self, record: Record) -> torch.Tensor:
        """Return a stored record's tensor on the CPU, in the record's shape, axes and dtype.

        Raises UserError where it is not what was stored.
        """

    def load(self, record: Record) -> torch.Tensor:
        """Return the tensor of a record of the manifest, of the kept tokens alone; see `read`."""
        if self._stored is None:
            return self.read(record)
        stored = self.stored(record)
        axis, whole = stored.whole_axis(self.manifest.kept), self.read(stored)
        # A dump's may be taken for a batch of one.
        cut = whole if axis is None else self.manifest.kept.cut(whole, axis)
        return cut.reshape(record.shape)

    def whole(self, record: Record) -> torch.Tensor:
        """Return the tensor of a record of the manifest, of all tokens that are stored."""
        tensor = self.read(self.stored(record))
        # A dump's may be taken for a batch of one.
        return tensor.unsqueeze(0) if tensor.dim() + 1 == len(record.shape) else tensor

    def stored(self, record: Record) -> Record:
        """Return a record of the manifest as it is stored, which may be of more tokens."""
        return record if self._stored is None else self._stored[record.site, record.file]

    def only(self, kept: KeptTokens) -> Self:
        """Return it as a run that kept these tokens of its prompts alone."""
        fewer = copy.copy(self)
        fewer._keep(kept)
        return fewer

    def _keep(self, kept: KeptTokens) -> None:
        every = [*self.manifest.records, *self.manifest.replicas]
        if self._stored is None:
            self._stored = {(each.site, each.file): each for each in every}
        records, replicas = (
            [each.only(kept) for each in held]
            for held in (self.manifest.records, self.manifest.replicas)
        )
        self.manifest = replace(self.manifest, records=records, replicas=replicas, kept=kept)

    @cached_property
    def prompt_mask(self) -> torch.Tensor | None:
        """Return bool [batch, token], true at the real tokens of prompts; None where all are."""
        return None

    @property
    def mask(self) -> torch.Tensor | None:
        """Return bool [batch, token], true at the kept tokens that are real; None: all are."""
        mask, kept = self.prompt_mask, self.manifest.kept
        return mask if mask is None or not kept else kept.cut(mask)

    @property
    def positions(self) -> torch.Tensor | None:
        """Return where in its prompt each kept token stands, int64 [batch, token]; None: not said.

        Padding counts for nothing.
        """
        mask, kept = self.prompt_mask, self.manifest.kept
        if mask is None:
            return None
        before = mask.long().cumsum(-1) - 1
        return kept.cut(before) if kept else before

    @cached_property
    def token_ids(self) -> torch.Tensor | None:
        """Return the prompt's tokens, int64 [batch, token]; None where none are kept."""
        return None

    def tensors_used(self, stage: str) -> dict[str, str]:
        """Return the digests, by stored name, of the checkpoint's tensors that a stage used.

        Empty where the run does not say. A part of a stage, or a whole of stages, gets theirs.
        """
        return {}

    @cached_property
    def effective(self) -> EffectiveWeights:
        """Return the prints of the weights that each stage's graph held, by stored name, by stage.

        Empty where the run does not say.
        """
        return {}

    @cached_property
    def used(self) -> UsedWeights:
        """Return the digests of the checkpoint's tensors that each stage used, by stage."""
        return {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the configuration that the run was made with; empty where it is not kept."""
        return {}


class RunSource(Source):
    """A finished run. Raises UserError where a file that is asked for is missing or damaged."""

    proved = True

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.folder = run.files
        self._tensors = TensorFiles(self.folder.locate_tensor)
        self.manifest = self.folder.read_manifest(run.tags.get(MANIFEST_TAG))
        if self.manifest.kept:
            self._keep(self.manifest.kept)

    def read(self, record: Record) -> torch.Tensor:
        """Return a record's tensor, mapped from its file, its bytes checked; see `Source.read`."""
        return checked_tensor(record, *self._tensors.read(record.file, str(record.site)))

    def tensors_used(self, stage: str) -> dict[str, str]:
        """Return what weights.json lists for the stage, for what holds it and what it holds."""
        digests: dict[str, str] = {}
        for name, used in self.used.items():
            if overlap(name, stage):
                digests.update(used)
        return digests

    @cached_property
    def effective(self) -> EffectiveWeights:
        """Return the prints of the weights that each stage's graph held, by stage and name."""
        return self.folder.read_effective_weights()

    @cached_property
    def used(self) -> UsedWeights:
        """Return the digests of the checkpoint's tensors that each stage used, by stage."""
        return self.folder.read_used_weights()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the configuration that the run was made with; empty where it is not kept."""
        return self.folder.read_config()

    @cached_property
    def prompt_mask(self) -> torch.Tensor | None:
        """Return the attention mask that the run was fed, as bool [batch, token]."""
        return self.folder.read_mask()

    @cached_property
    def token_ids(self) -> torch.Tensor | None:
        """Return the tokens that the run was fed, int64 [batch, token]; None where it was not."""
        return self.folder.read_token_ids()
