"""Lower a module to one StableHLO graph that runs like the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from layerparity.ground.errors import UserError
from layerparity.run.backends._export import exported

_NO_CACHE = "compile=export takes no cache: use generate.max_new_tokens=0 or backend.compile=lazy."
_NO_DATA = "use experts_implementation=static, or backend.compile=lazy."


class StageGraph:
    """A module as a compiled graph; arguments of other shapes get a graph of their own."""

    def __init__(
        self, module: nn.Module, around: Callable[[Callable[[], Any]], Any] = lambda work: work()
    ) -> None:
        """``around`` runs the lowering, which clears torch_xla's counters."""
        self._module = module
        self._around = around
        self._graphs: dict[str, _Graph] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the graph; returns what the module would, with tensors on the device.

        Arguments are tensors of any shape and dtype, plain values and nested containers of them, on
        one device with the module. Raises UserError where the module cannot be one graph.
        """
        leaves, spec = pytree.tree_flatten(args)
        shapes = [
            (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each
            for each in leaves
        ]
        key = str((spec, shapes))
        if key not in self._graphs:
            self._graphs[key] = self._around(lambda: _lower(self._module, args))
        return self._graphs[key].run(leaves)


@dataclass(frozen=True)
class _Graph:
    """StableHLO bytecode, and where each of its inputs comes from: an argument, or a tensor."""

    bytecode: bytes
    inputs: list[int | torch.Tensor]
    outputs: pytree.TreeSpec

    def run(self, leaves: Sequence[Any]) -> Any:
        import torch_xla

        values = [leaves[each] if isinstance(each, int) else each for each in self.inputs]
        results = torch_xla._XLAC._run_stablehlo(self.bytecode, values)
        return pytree.tree_unflatten(results, self.outputs)


def _lower(module: nn.Module, args: tuple[Any, ...]) -> _Graph:
    from torch_xla.stablehlo import StableHLOExportOptions, exported_program_to_stablehlo

    program = exported(module, _distinct(args), _NO_CACHE, _NO_DATA)
    for written in _written(program):
        raise UserError(
            f"This stage writes to {written} as it runs, which an exported graph would lose",
            "use backend.compile=lazy.",
        )
    # torch_xla's own decompositions make a safe softmax a plain one: NaN in rows that see no key.
    program = program.run_decompositions()
    # The weights stay where they are: the bundle's own copy goes through numpy, without bfloat16.
    options = StableHLOExportOptions(include_human_readable_text=False, export_weights=False)
    bundle = exported_program_to_stablehlo(program, options)._bundle
    function = bundle.stablehlo_funcs[0]
    states = {**program.constants, **program.state_dict}
    inputs: list[int | torch.Tensor] = []
    for place in function.meta.input_locations:
        if place.type_.value == "input_arg":
            inputs.append(place.position)
        elif place.type_.value == "parameter":
            inputs.append(states[place.name].detach())
        else:
            inputs.append(torch.from_numpy(bundle.additional_constants[place.position]))
    return _Graph(function.bytecode, inputs, program.call_spec.out_spec)


def _written(program: Any) -> Iterator[str]:
    """Yield the names of the module's or the caller's own tensors that the program writes to."""
    owned = {**program.graph_signature.inputs_to_buffers}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for value, argument in zip(node.args, schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                source = _source(value)
                if source.op == "placeholder":
                    yield owned.get(source.name, source.name)


def _source(node: Any) -> Any:
    """Follow views and in-place operations back to the tensor whose memory they share."""
    while node.op == "call_function":
        returns = node.target._schema.returns if hasattr(node.target, "_schema") else []
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]
    return node


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
