"""Mistakes of sharding in transformers' own tensor parallelism: planted in each rank's process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from sharding_cells import WRONG
from sharding_emulated import shares_normed

from layerparity.anatomy.shards import spans
from layerparity.mistakes.ranks import keep_slice
from layerparity.ports.base import Assets
from layerparity.ports.known._hf_rank import HfRank
from layerparity.ports.known._split import SplitPort
from layerparity.ports.ranks.side import RankAssets


class WrongSplitPort(SplitPort):
    """port=hf with tp_degree, whose ranks make a mistake."""

    side = "sharding_gloo.WrongHfRank"

    def __init__(self, assets: Assets, mistake: str) -> None:
        super().__init__(assets)
        self.keys = {**self.keys, "mistake": mistake}


class WrongHfRank(HfRank):
    """One rank, which plants the mistake when a block's weights have been split."""

    def __init__(self, assets: RankAssets, *, mistake: str, **keys: Any) -> None:
        super().__init__(assets, **keys)
        self.plant = getattr(self, f"_{mistake}")

    def load(self, stage: str) -> dict[str, str]:
        """Load and split a stage, then make the mistake in it."""
        used = super().load(stage)
        if stage.startswith("layers."):
            with torch.no_grad():
                self.plant(self.port.skeleton.module(stage))
        return used

    def _norm_per_rank(self, block: Any) -> None:
        for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
            norm.forward = shares_normed(norm, spans(len(norm.weight), self.assets.count))

    def _missing_reduction(self, block: Any) -> None:
        right = block.self_attn.o_proj.forward

        def forward(given: torch.Tensor) -> torch.Tensor:
            with _no_sums():
                part: torch.Tensor = right(given)
            return part

        block.self_attn.o_proj.forward = forward

    def _bias_on_each_rank(self, block: Any) -> None:
        module = block.self_attn.o_proj
        right, bias = module.forward, _local(module.bias)
        module.forward = lambda given: right(given) + (self.assets.count - 1) * bias

    def _experts_shifted(self, block: Any) -> None:
        if self.assets.rank == WRONG:
            for value in block.mlp.experts.parameters():
                own = _local(value)
                own.copy_(own.roll(1, 0))

    def _norm_sliced(self, block: Any) -> None:
        if self.assets.rank == WRONG:
            keep_slice(block.post_attention_layernorm.weight, self.assets.count, WRONG, 1.0)


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


@contextmanager
def _no_sums() -> Any:
    """Let nothing be added up over ranks inside."""
    dist: Any = torch.distributed
    right = dist.all_reduce
    dist.all_reduce = lambda *_, **__: None
    try:
        yield
    finally:
        dist.all_reduce = right
