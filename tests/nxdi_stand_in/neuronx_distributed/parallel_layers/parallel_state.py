"""The ranks of tensor parallelism: their group, how many there are, which one this is.

And how ranks that share experts by number are grouped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import distributed

from neuronx_distributed.utils import cpu_mode

_groups: dict[str, Any] = {}
# How many ranks one process traces for; 0: it is one of them.
_aot = {"ranks": 0}


class ParallelGroups(NamedTuple):
    """Groups of ranks that share tensors, and of those that share experts by number."""

    tp_groups: list[list[int]]
    ep_model_groups: list[list[int]]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    expert_model_parallel_size: int = 1,
    mesh_only: bool = False,
) -> ParallelGroups | None:
    """Make one group of all ranks; as NxD does, grant no more ranks than there are.

    With ``mesh_only``, make none and return which groups there would be: ranks in a row share
    tensors.
    """
    if mesh_only:
        tp, ep = tensor_model_parallel_size, expert_model_parallel_size
        rows = [list(range(first * tp, (first + 1) * tp)) for first in range(ep)]
        return ParallelGroups(rows, [list(column) for column in zip(*rows, strict=True)])
    if not cpu_mode() and not _aot["ranks"]:
        raise RuntimeError("the stand-in computes on the CPU alone: set NXD_CPU_MODE=1")
    if _aot["ranks"]:
        _groups["tensor"] = None
        return None
    size = min(tensor_model_parallel_size, distributed.get_world_size())
    _groups["tensor"] = distributed.new_group(list(range(size)), backend="gloo")
    if not skip_collective_init:
        distributed.barrier(group=_groups["tensor"])
    return None


def model_parallel_is_initialized() -> bool:
    """Return whether there is a group."""
    return "tensor" in _groups


def get_tensor_model_parallel_group() -> Any:
    """Return the group of ranks that share a model's tensors."""
    return _groups["tensor"]


def get_tensor_model_parallel_size() -> int:
    """Return how many ranks share a model's tensors."""
    return _aot["ranks"] or distributed.get_world_size(_groups["tensor"])


def get_tensor_model_parallel_rank() -> int:
    """Return the number of this rank among them."""
    return 0 if _aot["ranks"] else distributed.get_rank(_groups["tensor"])


def trace_for(ranks: int) -> None:
    """Say for how many ranks this process traces, 0 for none."""
    _aot["ranks"] = ranks


def get_aot_mode() -> bool:
    """Return whether this process traces for all ranks."""
    return _aot["ranks"] > 0


def destroy_model_parallel() -> None:
    """Forget the group."""
    _groups.clear()


def get_expert_parallel_rank_from_global_rank(rank: int, expert_parallel_group: Any) -> int:
    """Return which part of the experts a rank holds; a group knows its mesh."""
    return next(each.index(rank) for each in expert_parallel_group._mesh if rank in each)


def get_experts_for_expert_parallel_rank(
    expert_parallel_rank: int,
    total_number_of_experts: int,
    expert_model_parallel_size: int,
    expert_distribution: list[list[int]] | None = None,
) -> list[int]:
    """Return the experts of a part; a distribution says so for every part."""
    if expert_distribution:
        return expert_distribution[expert_parallel_rank]
    each = total_number_of_experts // expert_model_parallel_size
    return list(range(expert_parallel_rank * each, (expert_parallel_rank + 1) * each))
