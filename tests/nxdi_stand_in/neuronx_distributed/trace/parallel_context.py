"""The groups of ranks in a process that traces for all of them."""

from __future__ import annotations

from typing import Any

from neuronx_distributed.parallel_layers import parallel_state


class NxDParallelState:
    """As long as it is entered, there are as many ranks as it says, and this is the first."""

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        lnc_size: int | None = None,
    ) -> None:
        self.world_size, self.tensor_model_parallel_size = world_size, tensor_model_parallel_size

    def __enter__(self) -> NxDParallelState:
        parallel_state.trace_for(min(self.world_size, self.tensor_model_parallel_size))
        parallel_state.initialize_model_parallel(self.tensor_model_parallel_size)
        return self

    def __exit__(self, *_: Any) -> None:
        parallel_state.trace_for(0)
        parallel_state.destroy_model_parallel()
