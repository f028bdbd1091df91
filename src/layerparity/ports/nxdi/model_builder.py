"""Compile a rank's module by NeuronX Distributed's ModelBuilder, and run all ranks on the cores.

Written against the sources of NxD 2.28 (trace/model_builder_v2.py, nxd_model, parallel_context) and
run against a stand-in with their signatures; no Neuron device has shown it yet. One process traces
the first rank's module, and drives every core: that is how NxD's own example does it.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerparity.backends.neuron.artefacts import Compiled, GraphMaker, versions_of
from layerparity.ground.errors import UserError, said
from layerparity.machine import neuron_packages

_DECIDING = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "libneuronxla",
    "neuronx-cc",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)
# What the one graph in a saved model is called, and its file.
_TAG, _FILE = "stage", "nxd_model.pt"
_LIBRARY = "neuronx_distributed.trace.model_builder_v2"
# Inputs and outputs come by rank: [input][rank], [output][rank].
_RANKED = "ranked"


def require() -> None:
    """Raise UserError, with the cure, where no Neuron compiler or no such ModelBuilder is here."""
    cure = (
        "run where torch-neuronx 2.9 and neuronx-distributed 0.17 (SDK 2.28) are installed from "
        "AWS's own index, or leave backend.compile out: NxD's CPU mode compiles nothing."
    )
    if not neuron_packages.looks_real("torch_neuronx"):
        raise UserError(
            "port=nxdi backend.compile=trace needs torch_neuronx, which is not here", cure
        )
    try:
        from neuronx_distributed.trace import model_builder_v2, nxd_model, parallel_context

        _ = model_builder_v2.ModelBuilder, nxd_model.NxDModel, parallel_context.NxDParallelState
    except Exception as error:
        raise UserError(
            f"port=nxdi backend.compile=trace needs {_LIBRARY}, whose import {said(error)}", cure
        ) from error


class ParallelRanks:
    """NxD's groups of ``count`` ranks in this one process: it traces as the first of them."""

    def __init__(self, count: int) -> None:
        self.count, self._stack = count, ExitStack()

    def enter(self) -> dict[str, str]:
        """Make the groups; return facts. Raises UserError where fewer ranks are granted."""
        from neuronx_distributed.parallel_layers import parallel_state
        from neuronx_distributed.trace.parallel_context import NxDParallelState

        # It stands in for torch.distributed, too: there is no other process to join.
        made = NxDParallelState(world_size=self.count, tensor_model_parallel_size=self.count)
        self._stack.enter_context(made)
        granted = parallel_state.get_tensor_model_parallel_size()
        if granted != self.count:
            raise UserError(f"tp_degree={self.count} was asked and {granted} granted")
        return {"nxd_model_builder": "one process", **neuron_packages.versions()}


@dataclass(frozen=True)
class TracedStage:
    """What is compiled: a rank's module, and tensors of the shapes that it will be given.

    Its ``forward`` takes them in order, and returns as many tensors as ``module.shown`` then names.
    """

    module: Any
    inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ModelBuilderCompiler(GraphMaker):
    """NxD's ModelBuilder: one graph for all ranks, whose weights are inputs.

    What it makes is TorchScript with the compiled NEFF in it; torch reads that without Python's
    pickle. ``arguments`` are words for neuronx-cc, which works in a folder of its own in ``work``.
    """

    arguments: tuple[str, ...]
    recorded: Mapping[str, str]
    work: Path
    tp_degree: int

    @property
    def versions(self) -> Mapping[str, str]:
        """torch and AWS's packages; of those that were imported, what they say themselves."""
        return {**versions_of(_DECIDING), **neuron_packages.versions()}

    @property
    def options(self) -> Mapping[str, str]:
        """The compiler's options, and that it is NxD's ModelBuilder that calls it."""
        return {"compiler": "ModelBuilder", **self.recorded}

    def layout(self, program: TracedStage) -> str:
        """Return the degree: NxD's own layers say what is split."""
        return str(self.tp_degree)

    def compile(self, program: TracedStage, digest: str) -> Compiled:
        """Trace and compile a stage. Raises UserError where NxD or the compiler cannot."""
        from neuronx_distributed.trace.model_builder_v2 import ModelBuilder

        work = self.work / digest
        work.mkdir(parents=True, exist_ok=True)
        try:
            builder = ModelBuilder(program.module)
            builder.trace(args=program.inputs, tag=_TAG)
            # None is NxD's own choice of options.
            made = builder.compile(
                compiler_workdir=str(work), compiler_args=shlex.join(self.arguments) or None
            )
            # NxD leaves the weights out: each rank's are given to the graph when it is loaded.
            made.save(str(work / _FILE))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"NxD's ModelBuilder {said(error)}",
                f"see the compiler's own words in {work}, or leave backend.compile out.",
            ) from error
        payload = (work / _FILE).read_bytes()
        (work / _FILE).unlink()
        # `shown` is known once the module has been traced.
        return Compiled(payload, tuple(range(len(program.inputs))), (), tuple(program.module.shown))


class DeviceGraph:
    """A compiled graph on the cores, with the weights of every rank."""

    def __init__(self, compiled: Compiled, modules: Sequence[nn.Module]) -> None:
        """``modules`` are the ranks' own, whose weights are taken. Raises UserError if NxD fails.

        The graph is for as many ranks.
        """
        from neuronx_distributed.trace.nxd_model import NxDModel

        self.shown = compiled.outputs
        weights = [{n: v.detach() for n, v in each.state_dict().items()} for each in modules]
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / _FILE
                # NxD loads from a path alone.
                path.write_bytes(compiled.payload)
                self._model: Any = NxDModel.load(str(path))
            if not isinstance(self._model, NxDModel):
                # NxD returns what it read as it is where it cannot make a model of it.
                raise UserError(
                    "NxD could not take apart the model that it had saved",
                    "compile it again with backend.reuse_compiled=never.",
                )
            # In this order: once a model is on the cores, NxD refuses to set weights.
            self._model.set_weights(weights)
            self._model.to_neuron()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"Loading a compiled stage on Neuron {said(error)}") from error

    def __call__(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return each rank's outputs on the CPU, in the order of `shown`, by rank.

        ``inputs`` are each rank's, in the order of the traced ones, in their shapes and dtypes.
        """
        by_input = [list(each) for each in zip(*inputs, strict=True)]
        outputs = self._model(*by_input, forward_mode=_RANKED)
        return [[each.cpu() for each in rank] for rank in zip(*outputs, strict=True)]
