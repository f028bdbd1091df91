"""Same weights: whether a checkpoint still holds the bytes that an earlier run listed, cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerparity.errors import UserError
from layerparity.files import text_digest

if TYPE_CHECKING:
    from layerparity.models.checkpoint import Checkpoint

# Models up to this size are compared whole; of larger ones this much, spread over the stages.
BUDGET = 2**30


class SameWeights:
    """Compares the tensors of a scope's stages with digests, reading each tensor once.

    What is read is chosen by the hash of its name: small tensors and large ones, in every stage. A
    change in a tensor that was not chosen is left to the comparison, which knows every digest.
    """

    def __init__(self, checkpoint: Checkpoint, stages: Sequence[str], budget: int = BUDGET) -> None:
        self.checkpoint, self.stages, self.budget = checkpoint, stages, budget
        self._digests: dict[str, str] = {}

    def differing(self, used: Mapping[str, Mapping[str, str]]) -> str:
        """Return the first tensor that differs from ``used`` (digests by name, by stage), or ''.

        Only stages that overlap the scope are looked at: all of them where none does.
        """
        shared = {stage: used[stage] for stage in used if self._overlaps(stage)} or used
        for stage in shared:
            listed = shared[stage]
            lost = [name for name in listed if name not in self.checkpoint.tensors]
            if lost:
                return f"the checkpoint holds no {lost[0]}"
            names = self._sample(listed, self.budget // len(shared))
            for name, digest in self._read(names).items():
                if digest != listed[name]:
                    return name
        return ""

    def _overlaps(self, stage: str) -> bool:
        return any(
            f"{mine}.".startswith(f"{stage}.") or f"{stage}.".startswith(f"{mine}.")
            for mine in self.stages
        )

    def _sample(self, names: Mapping[str, str], room: int) -> list[str]:
        sizes = {name: self.checkpoint.tensors[name].bytes for name in names}
        chosen = []
        for name in sorted(sizes, key=text_digest):
            if sizes[name] <= room:
                room -= sizes[name]
                chosen.append(name)
        return chosen or sorted(sizes, key=lambda name: sizes[name])[:1]

    def _read(self, names: Sequence[str]) -> dict[str, str]:
        fresh = [name for name in names if name not in self._digests]
        try:
            self._digests |= self.checkpoint.read(fresh)[1]
        except OSError as error:
            where = self.checkpoint.folder
            raise UserError(f"{where} cannot be read ({error}): check the disk.") from error
        return {name: self._digests[name] for name in names}
