"""RMSNorm of the hidden states, and of queries or keys over the heads of all ranks."""

from __future__ import annotations

import torch
from neuronx_distributed.parallel_layers.layers import set_tensor_model_parallel_attributes
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)
from torch import nn


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, which every rank has whole."""

    sliced = False

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size), requires_grad=False), eps

    def preshard_hook(self, state: dict[str, torch.Tensor], name: str) -> bool:
        """Change nothing, but for the mistake: to load a rank's slice, and that repeatedly."""
        if self.sliced and name in state:
            count = get_tensor_model_parallel_size()
            part = state[name].chunk(count)[get_tensor_model_parallel_rank()]
            state[name] = part.repeat(count)
        return self.sliced

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return ``weight * given / sqrt(mean(given^2) + eps)``, [batch, token, channel]."""
        wide = given.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(given.dtype)


class AllHeadsNorm(nn.Module):
    """RMSNorm of queries or keys over the heads of all ranks, of which each has some.

    ``size`` are this rank's channels, ``whole`` how many channels the mean is over: those of
    padded heads are zero and do not count.
    """

    def __init__(self, size: int, whole: int, eps: float, alone: bool) -> None:
        super().__init__()
        self.whole, self.eps, self.alone = whole, eps, alone
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        set_tensor_model_parallel_attributes(self.weight, 0)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return this rank's channels of the normed heads, [batch, token, channel]."""
        wide = given.float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.alone:
            mean = squares / given.shape[-1]
        else:
            mean = reduce_from_tensor_model_parallel_region(squares) / self.whole
        return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(given.dtype)
