"""Compile exported stages by torch.compile, with the backend of torch's own device ``neuron``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerparity.backends.neuron.artefacts import Compiled, GraphCompiler, Runner, versions_of
from layerparity.ground.errors import UserError

_DECIDING = ("torch", "torch-neuronx", "transformers")


@dataclass(frozen=True)
class NativeCompiler(GraphCompiler):
    """torch.compile of a stage's exported graph: its weights, and what is observed, go in and out.

    Blocks of one shape share a graph. What is compiled stays in this process: the runtime keeps
    compiled code in a cache of its own, which needs no key of ours.
    """

    backend: str
    numerics: Mapping[str, str]
    _graphs: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def versions(self) -> Mapping[str, str]:
        """torch, torch-neuronx and transformers."""
        return versions_of(_DECIDING)

    @property
    def options(self) -> Mapping[str, str]:
        """The runtime's flags, and which backend of torch.compile this is."""
        return {"compiler": f"torch.compile {self.backend}", **self.numerics}

    def compile(self, program: Any, digest: str) -> Compiled:
        """Keep a program's graph by its digest, and note where each of its inputs comes from."""
        from torch.export.graph_signature import InputKind

        inputs: list[int | str] = []
        for spec in program.graph_signature.input_specs:
            is_argument = spec.kind is InputKind.USER_INPUT
            inputs.append(sum(isinstance(e, int) for e in inputs) if is_argument else spec.target)
        graph = copy.deepcopy(program.graph_module)
        # What an operation asks of types while it is traced is left there, and is no tensor.
        graph.graph.eliminate_dead_code()
        graph.recompile()
        self._graphs[digest] = graph
        return Compiled(digest.encode(), tuple(inputs))

    def runner(self, compiled: Compiled) -> Runner:
        """Return what runs a graph; it is compiled when it is first called.

        Raises UserError where the backend refuses it: nothing runs eagerly in its place.
        """
        from torch._dynamo.exc import TorchDynamoException

        # A break in the graph, or a shape that is no longer fixed, would run another computation.
        run_graph: Callable[..., Any] = torch.compile(
            self._graphs[compiled.payload.decode()],
            backend=self.backend,
            fullgraph=True,
            dynamic=False,
        )

        def run(values: Sequence[Any]) -> list[torch.Tensor]:
            try:
                return list(run_graph(*values))
            except TorchDynamoException as error:
                raise UserError(
                    f"torch.compile(backend={self.backend!r}) could not compile a stage "
                    f"({_first_line(error)})",
                    "use backend.compile=lazy, which runs eagerly.",
                ) from error

        return run


def _first_line(error: Exception) -> str:
    return next((each.strip() for each in str(error).splitlines() if each.strip()), "no reason")
