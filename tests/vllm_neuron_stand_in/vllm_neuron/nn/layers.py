"""Norm, embedding and head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.utils.weight_loader import rows_loader, set_weight_loader


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that must be loaded: until then no number is right."""
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)


class RMSNorm(nn.Module):
    """The usual norm; of channels that are padded, the ``real`` ones alone are counted."""

    def __init__(
        self, size: int, epsilon: float, dtype: torch.dtype, real: int | None = None
    ) -> None:
        super().__init__()
        self.weight = empty(size, dtype=dtype)
        self.epsilon, self.real = epsilon, real or size

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the normed channels, in the same type."""
        wide = given.float()
        mean = wide.square().sum(-1, keepdim=True) / self.real
        return self.weight * (wide * torch.rsqrt(mean + self.epsilon)).to(given.dtype)


class Embedding(nn.Module):
    """A table whose rows are shared; in a prompt each rank is given its slice of the tokens."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, mistake: str) -> None:
        super().__init__()
        self.group = get_tp_group()
        ranks = self.group.world_size
        self.weight = empty(-(-rows // ranks), size, dtype=dtype)
        shift = 1 if mistake == "wrong_vocabulary_shard" else 0
        set_weight_loader(self.weight, rows_loader(ranks, shift))

    def forward(
        self, ids: torch.Tensor, scatter_tokens: bool, rank: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows of ids [token], [token, channel]."""
        own = self.group.rank_in_group if rank is None else int(rank)
        here = ids - own * len(self.weight)
        mine = (here >= 0) & (here < len(self.weight))
        found = functional.embedding(here.where(mine, 0), self.weight) * mine[:, None]
        return self.group.reduce_scatter(found) if scatter_tokens else self.group.all_reduce(found)


class Head(nn.Module):
    """The logits of all ranks' rows, [token, vocabulary], perhaps padded."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, gathers: bool) -> None:
        super().__init__()
        self.group, self.gathers = get_tp_group(), gathers
        self.weight = empty(-(-rows // self.group.world_size), size, dtype=dtype)
        set_weight_loader(self.weight, rows_loader(self.group.world_size))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return logits of [token, channel]."""
        part = functional.linear(given, self.weight)
        return self.group.all_gather(part, dim=1) if self.gathers else part
