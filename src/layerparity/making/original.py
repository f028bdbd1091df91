"""A golden of the weights that a quantised checkpoint was made from: ``model.original=``.

The golden computes with the original's weights. Beside it one clean way computes with the quantised
ones, as published and dequantised: what quantising alone moves is in the floors, and in the prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import EMBEDDING
from layerparity.making.evaluate import StageCopy
from layerparity.model.architecture import read_config
from layerparity.model.prints import held_on_cpu, stage_prints
from layerparity.model.skeleton import Skeleton
from layerparity.ports.base import Assets
from layerparity.ports.known.hf import HfPort

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.tensor_hashes import TensorHashes
    from layerparity.record.manifest import WeightPrint


class Published:
    """A quantised checkpoint's weights, dequantised on the CPU, one stage at a time.

    ``copied`` is where evaluators keep the copy of a stage that has these weights.
    """

    def __init__(self, checkpoint: Checkpoint, skeleton: Skeleton) -> None:
        """``skeleton`` is the original's: this one's modules are of the same kind and type."""
        self.checkpoint, self.copied = checkpoint, StageCopy()
        implementations = skeleton.config._attn_implementation, None
        self.skeleton = Skeleton(
            read_config(checkpoint.config),
            skeleton.dtype,
            *implementations,
            skeleton.float32_patterns,
        )

    @contextmanager
    def loaded(self, stage: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yield a stage's parameters and buffers by their place in its module, while they are here.

        Raises UserError as `Skeleton.load` does.
        """
        with self._loaded(stage):
            yield dict(held_on_cpu(self.skeleton.module(stage)))

    def prints(
        self, stage: str, original: torch.nn.Module
    ) -> tuple[dict[str, str], dict[str, WeightPrint]]:
        """Return the hashes and the prints of a stage's weights, by stored name.

        A print says how far the weight is from the one in the stage's ``original`` module.
        """
        with self._loaded(stage) as hashes:
            checkpoint, module = self.checkpoint, self.skeleton.module(stage)
            prints = stage_prints(self.skeleton, checkpoint, stage, {}, hashes, trusting=True)
            before = self._as_stored(stage, original)
            after = self._as_stored(stage, module)
            found = {
                name: replace(each, moved=_moved(before[name], after[name]))
                for name, each in prints.items()
            }
        return {name: each.stored for name, each in hashes.items()}, found

    def _as_stored(self, stage: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return a stage's weights by the names, and in the shapes, of the quantised ones."""
        skeleton, stored = self.skeleton, dict[str, torch.Tensor]()
        for name, held in held_on_cpu(module):
            stored |= skeleton.as_stored(self.checkpoint, skeleton.weight(stage, name), held)
        return stored

    @contextmanager
    def _loaded(self, stage: str) -> Iterator[dict[str, TensorHashes]]:
        try:
            yield self.skeleton.load(self.checkpoint, stage)
        finally:
            self.skeleton.unload(stage)


class OriginalPort(HfPort):
    """transformers' modules with the original's weights, and the quantised ones beside them.

    What it says of its weights it says of the quantised ones: those are what candidates load. An
    embedding's rows are copied, which has no floor: they are the quantised ones here, too.
    """

    def __init__(self, assets: Assets, checkpoint: Checkpoint) -> None:
        super().__init__(assets)
        self.published = Published(checkpoint, self.skeleton)
        self._prints: dict[str, dict[str, WeightPrint]] = {}

    def load(self, stage: str) -> dict[str, str]:
        """Load the original's weights; return the hashes of the quantised ones, by name."""
        used = super().load(stage)
        if stage not in self._prints:
            used, self._prints[stage] = self.published.prints(stage, self.skeleton.module(stage))
        return used

    def fill(self, stage: str) -> dict[str, TensorHashes]:
        """Fill the stage's modules on the CPU; return what each stored tensor that it used held."""
        if stage == EMBEDDING:
            return self.skeleton.load(self.published.checkpoint, stage)
        return super().fill(stage)

    def expect(self, stage: str | None) -> None:
        """Begin to read the stage's weights while another one computes."""
        if stage != EMBEDDING:
            super().expect(stage)

    def effective_weights(self, stage: str) -> dict[str, WeightPrint]:
        """Return the prints of the quantised weights, with how far each was moved."""
        return self._prints[stage]


def _moved(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the root mean square of a weight's change over that of the weight, of any shape."""
    wide = before.detach().float()
    size = float(torch.linalg.vector_norm(wide))
    change = float(torch.linalg.vector_norm(after.detach().float() - wide))
    return change / size if size else change
