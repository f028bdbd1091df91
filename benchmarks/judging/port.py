"""A port with a mistake that is given, or with one that is drawn by its place among a seed's."""

from __future__ import annotations

from collections.abc import Sequence

from judging.mutations.draw import mutations
from layerparity.anatomy.site import Place
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
    """transformers' modules with a mutation: the one in that place among those of a seed.

    port._target_=judging.port.MutationPort +port.index=7 +port.layers=[1], with this folder's
    parent in PYTHONPATH. Raises UserError where a block has fewer.
    """

    def __init__(
        self, assets: Assets, index: int, layers: Sequence[int] | None = None, seed: int = 0
    ) -> None:
        self._index = index
        count = int(assets.checkpoint.config["num_hidden_layers"])
        super().__init__(assets, range(count) if layers is None else layers, seed)

    def _choose(self) -> Fault:
        block = self.skeleton.module(str(Place(min(self.layers))))
        chosen = mutations(self.seed, self._index + 1, block)[self._index]
        self.assets.backend.warnings.append(f"The mutation that was drawn: {chosen.story}.")
        return chosen
