"""A known mistake of a given degree and rank, planted in a model that XLA shards."""

from __future__ import annotations

from sharding_cells import WRONG, Cell

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.hypotheses import hypotheses
from layerparity.ports.base import Assets
from layerparity.ports.known.fault import PlantedPort


class PlantedRank(PlantedPort):
    """transformers' modules with what the id names, out of what is tried on a golden's block."""

    def __init__(self, assets: Assets, id_: str) -> None:
        self.id = id_
        super().__init__(assets, range(int(assets.checkpoint.config["num_hidden_layers"])))

    def _choose(self) -> Fault:
        block = self.skeleton.module("layers.0")
        return next(each for each in hypotheses(block) if each.id == self.id)


def fault_id(cell: Cell) -> str:
    """Return which of the hypotheses on a block a cell's mistake is."""
    degree = cell.degree
    return {
        "norm_per_rank": "qk_norm_per_rank",
        "kv_tiled": f"kv heads over {degree}",
        "bias_on_each_rank": f"o_proj.bias of {degree} ranks",
        "experts_shifted": f"expert before of rank {WRONG} of {degree}",
        "missing_reduction": f"o_proj of rank {WRONG} of {degree}",
        "norm_sliced": "weight_sliced_per_rank",
    }[cell.mistake]
