"""The ranks of a model, met once in a process."""

from __future__ import annotations

from torch import distributed
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator, set_tp_group


def initialize_neuron_parallel_state(tp_global_ranks: list[int], local_rank: int) -> None:
    """Make the group of these ranks, of which this process is one."""
    assert get_current_vllm_config().parallel_config.tensor_parallel_size == len(tp_global_ranks)
    made = distributed.new_group(tp_global_ranks, backend="gloo")
    set_tp_group(GroupCoordinator(made, tp_global_ranks.index(local_rank), len(tp_global_ranks)))
