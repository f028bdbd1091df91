"""Run a stage's module as one compiled graph, its weights among the graph's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from layerparity.backends.export import exported
from layerparity.backends.graph import graph_digest, refuse_frozen, refuse_written, states_of
from layerparity.backends.neuron.artefacts import ArtefactFolder, Compiled, GraphCompiler, Runner
from layerparity.backends.neuron.cached_stage import CACHE, CachedStage, cache_among

_NO_CACHE = "compile={} takes no such cache: use generate.max_new_tokens=0 or compile=lazy."
_NO_DATA = "use experts_implementation=static, or backend.compile=lazy."


@dataclass
class Graphs:
    """The graphs of one run, each compiled or loaded once: blocks of one shape share one.

    ``folder`` keeps them for other runs; without one they are forgotten with the process.
    """

    compiler: GraphCompiler
    folder: ArtefactFolder | None = None
    _ready: dict[tuple[str, str], tuple[Compiled, Runner]] = field(default_factory=dict, init=False)

    @property
    def mode(self) -> str:
        """The value of backend.compile that makes such graphs."""
        return "export" if self.folder is None else "trace"

    def bind(self, module: nn.Module, args: tuple[Any, ...]) -> Callable[[Sequence[Any]], Any]:
        """Return what runs a module's graph on the leaves of arguments like these.

        Raises UserError where the module cannot be one graph, and for one that holds a constant
        where another weight was loaded.
        """
        program = exported(module, _distinct(args), _NO_CACHE.format(self.mode), _NO_DATA)
        refuse_written(program)
        refuse_frozen(program)
        digest = graph_digest(program)
        # One program may be split over devices in several ways, which its digest does not say.
        key = digest, self.compiler.layout(program)
        if key not in self._ready:
            made = (
                self.compiler.compile(program, digest)
                if self.folder is None
                else self.folder.get(program, digest, self.compiler)
            )
            self._ready[key] = made, self.compiler.runner(made)
        compiled, runner = self._ready[key]
        states, spec = states_of(program), program.call_spec.out_spec
        # An argument's place, or the tensor itself: the graph holds no weight.
        inputs: list[int | torch.Tensor] = []
        for each in compiled.inputs:
            if isinstance(each, str):
                inputs.append(states[each].detach())
            else:
                inputs.append(each if isinstance(each, int) else compiled.constants[each[0]])

        def run(leaves: Sequence[Any]) -> Any:
            values = [leaves[each] if isinstance(each, int) else each for each in inputs]
            return pytree.tree_unflatten(runner(values), spec)

        return run


class StageGraph:
    """A module as a compiled graph; arguments of other shapes get a graph of their own."""

    def __init__(self, module: nn.Module, graphs: Graphs) -> None:
        self._module = module
        self._graphs = graphs
        self._bound: dict[str, Callable[[Sequence[Any]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the graph; returns what the module would, with tensors on the device.

        Arguments are tensors of any shape and dtype, plain values and nested containers of them, on
        one device with the module. A static cache among the keyword arguments goes in and out as
        tensors. Raises UserError where the module cannot be one graph.
        """
        cache = cache_among(args)
        if cache is None:
            return self._run(self._module, args)
        given, arguments = args
        stage = CachedStage(self._module, cache, self._graphs.mode)
        plain = {name: value for name, value in arguments.items() if name != CACHE}
        result, state = self._run(stage, (given, plain, stage.state(given.device)))
        stage.keep(state)
        return result

    def _run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Run a module's graph for arguments of these shapes."""
        leaves, spec = pytree.tree_flatten(args)
        shapes = [
            (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each
            for each in leaves
        ]
        # Plain values are written into a graph, so another one is another graph.
        key = str((spec, shapes))
        if key not in self._bound:
            self._bound[key] = self._graphs.bind(module, args)
        return self._bound[key](leaves)


def _distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments without the same tensor twice: the graph's inputs are found by identity."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        twice = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if twice else leaf

    distinct: tuple[Any, ...] = pytree.tree_map(own, args)
    return distinct
