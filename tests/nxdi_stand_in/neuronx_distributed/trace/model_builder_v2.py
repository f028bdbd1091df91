"""A stand-in of NxD's ModelBuilder with its signatures: its compiler is torch.export.

What it "compiles" runs on threads of the CPU. It shows that a graph is traced, kept, read back and
fed; it shows nothing of Neuron's compiler or arithmetic.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch_neuronx
from torch import nn
from torch.func import functional_call

from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.nxd_model import NxDModel


class _OfWeights(nn.Module):
    """A module as a function of its weights and its inputs: the graph holds no weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # A tuple: its parameters are not this module's.
        self.model = (model,)

    def forward(self, weights: dict[str, torch.Tensor], *args: torch.Tensor) -> Any:
        """Return what the module returns."""
        return functional_call(self.model[0], weights, args)


class ModelBuilder:
    """Traces a module with example inputs, by tag, and compiles what was traced."""

    def __init__(
        self,
        model: Callable[..., Any] | nn.Module,
        weights_to_skip_layout_optimization: set[str] | None = None,
    ) -> None:
        if not torch_neuronx.__version__.startswith("2"):
            raise AssertionError(f"torch-neuronx is {torch_neuronx.__version__}")
        self.model: Any = model
        self.traced: dict[str, Any] = {}

    def trace(
        self,
        args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        kwargs: dict[str, torch.Tensor] | None = None,
        tag: str | None = None,
        spmd: bool = True,
    ) -> ModelBuilder:
        """Trace the module as the first rank's."""
        given = (args,) if isinstance(args, torch.Tensor) else tuple(args or ())
        given += tuple((kwargs or {}).values())
        weights = {name: each.detach() for name, each in self.model.state_dict().items()}
        with torch.no_grad():
            self.traced[tag or "model"] = torch.export.export(
                _OfWeights(self.model), (weights, *given), strict=False
            )
        return self

    def compile(
        self,
        priority_model_key: str | None = None,
        compiler_workdir: str | pathlib.Path | None = None,
        compiler_args: str | dict[str, str] | None = None,
        max_workers: int | None = None,
    ) -> NxDModel:
        """Return the traced graphs as a model for all ranks."""
        if not self.traced:
            raise ValueError("nothing was traced")
        made = NxDModel(parallel_state.get_tensor_model_parallel_size())
        made.programs.update(self.traced)
        return made
