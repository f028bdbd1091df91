"""Mistakes of sharding in transformers' modules as one process computes them for several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sharding_cells import WRONG
from torch import nn

from layerparity.anatomy.shards import spans
from layerparity.mistakes.ranks import keep_slice
from layerparity.ports.base import Assets
from layerparity.ports.known.hf import HfPort
from layerparity.ports.observed.by_rank import Ranks
from layerparity.ports.observed.shard import added, among, by_columns, by_rows, expert_shares

Forward = Callable[..., Any]


class WrongRanks(Ranks):
    """So many ranks, of which one or all make a mistake in the modules that it is about."""

    def __init__(self, config: Any, count: int, mistake: str) -> None:
        super().__init__(config, count)
        self.mistake = mistake
        if mistake == "kv_tiled":
            keys = config.num_key_value_heads
            self.shares = [
                replace(share, reads=tuple(rank % keys for _ in share.reads))
                for rank, share in enumerate(self.shares)
            ]

    def _forward(self, path: str, module: nn.Module) -> Forward | None:
        name, made = path.rpartition(".")[2], getattr(self, f"_{self.mistake}", None)
        if made is None or name not in _MODULES[self.mistake]:
            return super()._forward(path, module)
        wrong: Forward = made(path, module)
        return wrong

    def _norm_per_rank(self, path: str, module: Any) -> Forward:
        query = path.endswith("q_norm")
        held = {kv: (kv, kv + 1) for share in self.shares for kv in share.kept}
        heads = [(each.first, each.end) for each in self.shares] if query else list(held.values())
        width = len(module.weight) // max(end for _, end in heads)
        return shares_normed(module, [(first * width, end * width) for first, end in heads])

    def _missing_reduction(self, path: str, module: Any) -> Forward:
        return by_columns(module, self._columns(path, module)[:1])

    def _bias_on_each_rank(self, path: str, module: Any) -> Forward:
        right = by_columns(module, self._columns(path, module))
        return lambda given: right(given) + (self.count - 1) * module.bias

    def _experts_shifted(self, path: str, module: Any) -> Forward:
        styles = {name: self._style(f"{path}.{name}") for name in module._parameters}

        def forward(hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
            own = among(routing, 0, self.experts)
            shares = expert_shares(module, styles, 0, self.experts, self.count)
            return added(
                type(module).forward(shifted(share) if rank == WRONG else share, hidden, *own)
                for rank, share in enumerate(shares)
            )

        return forward

    def _norm_sliced(self, path: str, module: Any) -> Forward:
        own = copy.deepcopy(module)
        keep_slice(own.weight, self.count, 0, 1.0)
        forward: Forward = own.forward
        return forward

    def _head_of_rank_0(self, path: str, module: Any) -> Forward:
        return by_rows(module, [spans(module.out_features, self.count)[0]] * self.count)


_MODULES: dict[str, tuple[str, ...]] = {
    "norm_per_rank": ("q_norm", "k_norm"),
    "missing_reduction": ("o_proj",),
    "bias_on_each_rank": ("o_proj",),
    "experts_shifted": ("experts",),
    "norm_sliced": ("post_attention_layernorm",),
    "head_of_rank_0": ("lm_head",),
}


def shifted(share: nn.Module) -> nn.Module:
    """Return experts with the weights of the one before each, of the same ranks' width."""
    own = copy.copy(share)
    held = share._parameters.items()
    own._parameters = {n: None if v is None else v.roll(1, 0) for n, v in held}  # type: ignore[misc]
    return own


def shares_normed(module: Any, shares: list[tuple[int, int]]) -> Forward:
    """Return an RMSNorm [..., channel] that is taken over each of several spans by itself."""

    def forward(values: torch.Tensor) -> torch.Tensor:
        made = []
        for first, end in shares:
            own = copy.copy(module)
            own._parameters = {"weight": module.weight[first:end]}
            made.append(type(module).forward(own, values[..., first:end]))
        return torch.cat(made, -1)

    return forward


class WrongRanksPort(HfPort):
    """port=hf port.emulate_tp=, with a mistake."""

    def __init__(self, assets: Assets, count: int, mistake: str) -> None:
        super().__init__(assets, emulate_tp=count)
        self.ranks = WrongRanks(self.skeleton.config, count, mistake)
