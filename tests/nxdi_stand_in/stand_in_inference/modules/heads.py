"""How many heads there are when ranks share them: query heads padded, key heads replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ShardedHeads:
    """Query and key heads of a checkpoint, and of all ranks together."""

    stored_queries: int
    stored_keys: int
    queries: int
    keys: int

    def pad_queries(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensor with zeros for padded heads, behind those of each key head."""
        groups = tensor.unflatten(dim, (self.stored_keys, -1))
        blank = (self.queries - self.stored_queries) * groups.shape[dim + 1] // self.stored_queries
        shape = [blank if at == dim + 1 else size for at, size in enumerate(groups.shape)]
        return torch.cat([groups, groups.new_zeros(shape)], dim + 1).flatten(dim, dim + 1)

    def repeat_keys(self, tensor: torch.Tensor, tiled: bool = False) -> torch.Tensor:
        """Return a tensor of all key heads with each one as often as ranks need it, side by side.

        ``tiled`` is the mistake: all of them one after the other, and then again.
        """
        times = self.keys // self.stored_keys
        heads = tensor.unflatten(0, (self.stored_keys, -1))
        if tiled:
            return heads.repeat(times, *(1,) * (heads.dim() - 1)).flatten(0, 1)
        return heads.repeat_interleave(times, 0).flatten(0, 1)


def sharded_heads(config: Any) -> ShardedHeads:
    """Return how the heads of a configuration are shared at its ``tp_degree``."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    degree = config.neuron_config.tp_degree
    if keys % degree and degree % keys:
        raise AssertionError(f"{keys} key heads cannot be replicated to tp_degree={degree}")
    return ShardedHeads(queries, keys, -(-queries // degree) * degree, max(keys, degree))
