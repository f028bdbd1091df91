"""Compile exported stages by ``torch_neuronx.trace``, for Neuron devices.

Written against AWS's documented interface and tested against a stand-in with its signature; not yet
run on hardware.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from layerparity.backends.graph import inputs_read, states_of
from layerparity.backends.neuron.artefacts import Compiled, GraphCompiler, Runner, versions_of
from layerparity.backends.neuron.compiler_options import CompilerOptions
from layerparity.ground.errors import UserError
from layerparity.machine import neuron_packages

_DECIDING = ("torch", "torch_neuronx", "neuronx-cc", "transformers")


@dataclass(frozen=True)
class NeffCompiler(GraphCompiler):
    """``torch_neuronx.trace`` of a graph whose weights are inputs.

    What it makes is TorchScript with the compiled NEFF in it; torch reads that without Python's
    pickle. The compiler works in a folder of its own below ``work``.
    """

    asked: CompilerOptions
    numerics: Mapping[str, str]
    work: Path

    @property
    def versions(self) -> Mapping[str, str]:
        """torch, torch_neuronx, the compiler and transformers."""
        return versions_of(_DECIDING)

    @property
    def options(self) -> Mapping[str, str]:
        """The runtime's flags and the compiler's, and that this is a NEFF."""
        return {"compiler": "neuronx-cc", **self.numerics, **self.asked.recorded()}

    def compile(self, program: Any, digest: str) -> Compiled:
        """Trace an exported program's graph with fixed shapes. Raises UserError where it fails."""
        package: Any = neuron_packages.torch_neuronx()
        graph, read = _plain_graph(program)
        leaves, states = pytree.tree_leaves(program.example_inputs), states_of(program)
        read_now = {name: states[name] if isinstance(name, str) else leaves[name] for name in read}
        # torch_neuronx traces with tensors of the CPU, wherever the stage lies.
        tensors = {n: v.detach().cpu() for n, v in read_now.items() if torch.is_tensor(v)}
        work = self.work / digest
        work.mkdir(parents=True, exist_ok=True)
        try:
            traced = package.trace(
                _Flat(graph, [read_now[name] for name in read]),
                tuple(tensors.values()),
                compiler_workdir=str(work),
                compiler_args=self.asked.arguments(),
            )
        except RuntimeError as error:
            raise UserError(
                f"torch_neuronx.trace could not compile a stage ({str(error).splitlines()[0]})",
                f"see the compiler's own words in {work}, or use backend.compile=lazy.",
            ) from error
        kept = io.BytesIO()
        torch.jit.save(traced, kept)
        return Compiled(kept.getvalue(), tuple(tensors))

    def runner(self, compiled: Compiled) -> Runner:
        """Return what runs a traced graph, which takes and gives tensors of the CPU."""
        traced = torch.jit.load(io.BytesIO(compiled.payload))

        def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            outputs = traced(*(each.cpu() for each in values))
            return [each.to(values[0].device) for each in outputs]

        return run


class _Flat(torch.nn.Module):
    """A graph as a function of tensors alone, its other inputs as they were on export."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.inputs = [None if torch.is_tensor(each) else (each,) for each in inputs]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the graph's outputs, in order, in its shapes and dtypes."""
        given = iter(tensors)
        return tuple(self.graph(*(next(given) if e is None else e[0] for e in self.inputs)))


def _plain_graph(program: Any) -> tuple[torch.fx.GraphModule, list[int | str]]:
    """Return a program's graph with the inputs it reads alone, and what these are.

    An exported graph also asserts on which device its tensors were, and they will be elsewhere.
    """
    program = program.run_decompositions()
    graph: Any = program.graph_module
    read = inputs_read(program)
    for node in reversed(list(graph.graph.nodes)):
        # torch counts an assertion as an effect, so it is no dead code by itself.
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    kept = {node for _, node in read}
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and node not in kept:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph, [name for name, _ in read]
