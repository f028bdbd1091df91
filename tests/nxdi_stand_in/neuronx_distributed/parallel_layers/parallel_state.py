"""The ranks of tensor parallelism: their group, how many there are, which one this is."""

from __future__ import annotations

from typing import Any

from torch import distributed

from neuronx_distributed.utils import cpu_mode

_groups: dict[str, Any] = {}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, skip_collective_init: bool = False
) -> None:
    """Make one group of all ranks; as NxD does, grant no more ranks than there are."""
    if not cpu_mode():
        raise RuntimeError("the stand-in computes on the CPU alone: set NXD_CPU_MODE=1")
    size = min(tensor_model_parallel_size, distributed.get_world_size())
    _groups["tensor"] = distributed.new_group(list(range(size)), backend="gloo")
    if not skip_collective_init:
        distributed.barrier(group=_groups["tensor"])


def model_parallel_is_initialized() -> bool:
    """Return whether there is a group."""
    return "tensor" in _groups


def get_tensor_model_parallel_group() -> Any:
    """Return the group of ranks that share a model's tensors."""
    return _groups["tensor"]


def get_tensor_model_parallel_size() -> int:
    """Return how many ranks share a model's tensors."""
    return distributed.get_world_size(_groups["tensor"])


def get_tensor_model_parallel_rank() -> int:
    """Return the number of this rank among them."""
    return distributed.get_rank(_groups["tensor"])
