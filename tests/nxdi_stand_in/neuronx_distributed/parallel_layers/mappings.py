"""Collectives of the ranks that share a tensor."""

from __future__ import annotations

import torch
from torch import distributed

from neuronx_distributed.parallel_layers import device_ranks
from neuronx_distributed.parallel_layers.parallel_state import (
    get_aot_mode,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)


def reduce_from_tensor_model_parallel_region(part: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks."""
    if get_aot_mode():
        return device_ranks.all_reduce(part)
    total = part.clone(memory_format=torch.contiguous_format)
    if get_tensor_model_parallel_size() > 1:
        distributed.all_reduce(total, group=get_tensor_model_parallel_group())
    return total


def reduce_scatter_to_sequence_parallel_region(part: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, [batch, token, ...], of this rank's tokens."""
    count, rank = get_tensor_model_parallel_size(), get_tensor_model_parallel_rank()
    if get_aot_mode():
        whole = torch.stack(reduce_from_tensor_model_parallel_region(part).chunk(count, 1))
        return whole.index_select(0, device_ranks.rank(part)[None])[0]
    return reduce_from_tensor_model_parallel_region(part).chunk(count, 1)[rank]


def gather_from_sequence_parallel_region(part: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all ranks, [batch, token, ...]."""
    return gather_from_tensor_model_parallel_region(part.transpose(1, -1)).transpose(1, -1)


def gather_from_tensor_model_parallel_region(part: torch.Tensor) -> torch.Tensor:
    """Return the ranks' parts side by side in the last dimension."""
    count = get_tensor_model_parallel_size()
    if count == 1:
        return part
    if get_aot_mode():
        return torch.cat(device_ranks.all_gather(part, count).unbind(0), -1)
    parts = [torch.empty_like(part) for _ in range(count)]
    distributed.all_gather(parts, part.contiguous(), group=get_tensor_model_parallel_group())
    return torch.cat(parts, -1)
