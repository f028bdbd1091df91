"""Linear layers and an embedding of which each rank holds a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from neuronx_distributed.parallel_layers import device_ranks
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed.parallel_layers.parallel_state import (
    get_aot_mode,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)


def parted(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, count: int | None = None
) -> nn.Parameter:
    """Return a parameter that holds this rank's part of ``shape`` along ``dim``, one of ``count``.

    Without a number, all ranks share it.
    """
    count = count or get_tensor_model_parallel_size()
    if shape[dim] % count:
        raise AssertionError(f"{shape[dim]} is not divisible by {count} ranks")
    own = [size // count if place == dim else size for place, size in enumerate(shape)]
    # What is not loaded later must not be right by luck.
    parameter = nn.Parameter((torch.randn(own) * 0.02).to(dtype), requires_grad=False)
    set_tensor_model_parallel_attributes(parameter, dim, count=count)
    return parameter


def set_tensor_model_parallel_attributes(
    parameter: Any, dim: int, stride: int = 1, count: int | None = None
) -> None:
    """Say of a parameter that ranks share it, along which dimension, in how many strides."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = stride
    parameter.num_partitions = count or get_tensor_model_parallel_size()


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output channels are shared."""

    everybody_is_rank_0 = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.gather_output, self.add_bias = gather_output, bias
        self.weight = parted((output_size, input_size), 0, dtype)
        self.bias = parted((output_size,), 0, dtype) if bias else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return this rank's channels of the output, or all of them."""
        part = functional.linear(given, self.weight, self.bias)
        if self.everybody_is_rank_0:
            # As where each rank was loaded with the first one's rows.
            distributed.broadcast(part, 0, group=get_tensor_model_parallel_group())
        return gather_from_tensor_model_parallel_region(part) if self.gather_output else part


class RowParallelLinear(nn.Module):
    """A linear layer whose input channels are shared; its outputs are added up."""

    # What sharding bugs leave out or do too often.
    bias_on_each_rank = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        reduce_output: bool = True,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        self.reduce_output, self.add_bias = reduce_output, bias
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.weight = parted((output_size, input_size), 1, dtype)
        shown = torch.randn(output_size).to(dtype)
        self.bias = nn.Parameter(shown, requires_grad=False) if bias else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the output of all ranks' channels, its bias added once."""
        early = self.bias if self.bias_on_each_rank else None
        part = functional.linear(given, self.weight, early)
        total = part
        if self.sequence_parallel_enabled:
            total = reduce_scatter_to_sequence_parallel_region(part)
        elif self.reduce_output:
            total = reduce_from_tensor_model_parallel_region(part)
        return total if self.bias is None or self.bias_on_each_rank else total + self.bias


class ParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is shared."""

    everybody_is_rank_0 = False

    # Whether what the ranks found is added up by whoever is next.
    collect_output = True

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parted((num_embeddings, embedding_dim), 0, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids, float [batch, token, channel]."""
        rows = len(self.weight)
        rank: int | torch.Tensor = get_tensor_model_parallel_rank()
        if get_aot_mode():
            rank = device_ranks.rank(self.weight)
        if self.everybody_is_rank_0:
            rank = 0
        here = ids - rank * rows
        own = (here >= 0) & (here < rows)
        found = functional.embedding(here.where(own, 0), self.weight) * own[..., None]
        return reduce_from_tensor_model_parallel_region(found) if self.collect_output else found
