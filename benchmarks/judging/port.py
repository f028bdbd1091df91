"""A port with a mistake that is given, or with one of those that a seed draws."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from judging.mutations.draw import Mutation, every_mutation, mutations
from layerparity.anatomy.site import Place
from layerparity.ground.errors import UserError
from layerparity.mistakes.fault import Fault
from layerparity.ports.base import Assets
from layerparity.ports.known.fault import PlantedPort


class FaultyPort(PlantedPort):
    """transformers' modules with a fault that is given, in one block."""

    def __init__(self, assets: Assets, fault: Fault, layer: int, seed: int) -> None:
        self._given = fault
        super().__init__(assets, [layer], seed)

    def _choose(self) -> Fault:
        return self._given


class MutationPort(PlantedPort):
    """transformers' modules with a mutation: one of those that a seed draws.

    ``which`` is its place among them, or its id, in which a star stands for anything.
    port._target_=judging.port.MutationPort +port.which=7 +port.layers=[1], with this folder's
    parent in PYTHONPATH. Raises UserError where a block has no such mutation.
    """

    def __init__(
        self, assets: Assets, which: int | str, layers: Sequence[int] | None = None, seed: int = 0
    ) -> None:
        self._which = which
        count = int(assets.checkpoint.config["num_hidden_layers"])
        super().__init__(assets, range(count) if layers is None else layers, seed)

    def _choose(self) -> Fault:
        block = self.skeleton.module(str(Place(min(self.layers))))
        if isinstance(self._which, int):
            chosen = mutations(self.seed, self._which + 1, block)[self._which]
        else:
            chosen = _of_id(every_mutation(self.seed, block), self._which)
        self.assets.backend.warnings.append(f"The mutation that was drawn: {chosen.story}.")
        return chosen


def _of_id(drawn: Sequence[Mutation], pattern: str) -> Mutation:
    found = next((each for each in drawn if fnmatchcase(each.id, pattern)), None)
    if found is None:
        raise UserError(f"No mutation of such a block is called '{pattern}'.")
    return found
