"""A stand-in of what NxD's ModelBuilder makes: it is saved, loaded, given weights, and run."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch import nn

from neuronx_distributed.parallel_layers.device_ranks import run_ranks


class NxDModel(nn.Module):
    """Graphs for ``world_size`` ranks, which are threads of this process."""

    def __init__(
        self,
        world_size: int,
        start_rank: int | None = None,
        local_ranks_size: int | None = None,
        state_initializer: Any = None,
        layout_transformer: Any = None,
    ) -> None:
        super().__init__()
        self.world_size = world_size
        self.programs: dict[str, Any] = {}
        self.weights: list[dict[str, torch.Tensor]] = []
        self.loaded_on_neuron = False

    def set_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """Take the weights of each rank, by their names in the traced module."""
        if self.loaded_on_neuron:
            raise ValueError("it is loaded: weights are replaced, not set")
        if len(sharded_checkpoint) != self.world_size:
            raise ValueError(f"{len(sharded_checkpoint)} ranks' weights for {self.world_size}")
        self.weights = [dict(each) for each in sharded_checkpoint]
        if os.environ.get("STAND_IN_MISTAKE") == "weights_of_rank_0":
            self.weights = self.weights[:1] * self.world_size

    def to_neuron(self) -> None:
        """Put it where it runs."""
        self.loaded_on_neuron = True

    def replace_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """Take other weights."""
        self.loaded_on_neuron = False
        self.set_weights(sharded_checkpoint)
        self.to_neuron()

    def forward(
        self,
        *args: Any,
        model_name: str | None = None,
        forward_mode: str = "default",
        **kwargs: Any,
    ) -> list[list[torch.Tensor]]:
        """Return [output][rank] for inputs [input][rank]."""
        if not self.loaded_on_neuron:
            raise RuntimeError("set_weights() and to_neuron() come first")
        if forward_mode != "ranked":
            raise NotImplementedError(f"the stand-in has no forward_mode={forward_mode}")
        (program,) = self.programs.values()
        graph = program.module()

        def run(rank: int) -> Any:
            return graph(self.weights[rank], *(each[rank] for each in args))

        outputs = run_ranks(self.world_size, run)
        return [list(each) for each in zip(*outputs, strict=True)]

    def save(self, path_to_save: str, save_weights: bool = False) -> None:
        """Write the graphs to a file."""
        kept = {}
        for tag, program in self.programs.items():
            data = io.BytesIO()
            torch.export.save(program, data)
            kept[tag] = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        torch.save({"world_size": self.world_size, "programs": kept}, path_to_save)

    @classmethod
    def load(
        cls,
        path_to_model: str,
        start_rank: int | None = None,
        local_ranks_size: int | None = None,
    ) -> NxDModel:
        """Read what `save` wrote."""
        kept = torch.load(path_to_model, weights_only=True)
        made = cls(kept["world_size"], start_rank, local_ranks_size)
        for tag, data in kept["programs"].items():
            made.programs[tag] = torch.export.load(io.BytesIO(data.numpy().tobytes()))
        return made
