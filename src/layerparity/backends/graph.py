"""Look into an exported graph: what tells it from others, what it reads, what it holds frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest

# So many constants are named in a message.
_SHOWN = 3


def graph_digest(program: Any) -> str:
    """Return the hash of all that an exported program computes, its inputs' values left out.

    Operations, constants written into them, shapes and dtypes, the names of weights and the
    structure of arguments and outputs count: blocks of one shape have one digest.
    """
    lines = [str(program.call_spec.in_spec), str(program.call_spec.out_spec)]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    for path, module in program.graph_module.named_modules():
        if isinstance(module, fx.GraphModule):
            lines += [f"{path}: {_line(node)}" for node in module.graph.nodes]
    return text_digest("\n".join(lines))


def _line(node: fx.Node) -> str:
    """Return what a node computes, and the shape and dtype of it; no address in memory."""
    target: Any = node.target
    if not isinstance(target, str | torch._ops.OpOverload):
        target = getattr(target, "__name__", None) or target.name()
    values = [
        (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else type(each)
        for each in pytree.tree_leaves(node.meta.get("val"))
    ]
    return f"{node.op} {node.name} {target} {node.args} {node.kwargs} {values}"


def states_of(program: Any) -> dict[str, torch.Tensor]:
    """Return every tensor that a program's graph takes beside its arguments, by name.

    These are the module's weights and buffers, and constants of its code.
    """
    return {**program.constants, **program.state_dict}


def inputs_read(program: Any) -> list[tuple[int | str, fx.Node]]:
    """Return the inputs that the outputs depend on, in the graph's order, each with its node.

    An argument is named by its place among the leaves of the arguments, a state by its name.
    """
    from torch.export.graph_signature import InputKind

    (output,) = (node for node in program.graph.nodes if node.op == "output")
    reached, waiting = set(), [output]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += node.all_input_nodes
    read: list[tuple[int | str, fx.Node]] = []
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
    arguments = 0
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        name = spec.target
        if spec.kind is InputKind.USER_INPUT:
            name, arguments = arguments, arguments + 1
        if node in reached:
            read.append((name, node))
    return read


@dataclass(frozen=True)
class Unread:
    """A weight that a graph does not read, and the constants that may stand in its place.

    ``equal`` says that one of these holds what the weight does.
    """

    weight: str
    constants: tuple[str, ...]
    equal: bool


def unread_weights(program: Any) -> Iterator[Unread]:
    """Yield each weight that a program was given and does not use.

    A constant of the graph that is no weight and has its shape may be it, as it was when somebody
    froze it. Parameters and buffers that are saved with a model are weights.
    """
    states = states_of(program)
    read = {name for name, _ in inputs_read(program) if isinstance(name, str)}
    weights = set(program.state_dict)
    frozen = {name: states[name].detach().cpu() for name in sorted(read - weights)}
    for name in sorted(weights - read):
        weight = states[name].detach().cpu()
        alike = {each: value for each, value in frozen.items() if value.shape == weight.shape}
        equal = any(torch.equal(each.to(weight.dtype), weight) for each in alike.values())
        yield Unread(name, tuple(alike), equal)


def refuse_frozen(program: Any) -> None:
    """Refuse a graph that holds a constant where a weight of other values was loaded.

    Raises UserError that names the weight and the constant, before anything is compiled or run.
    """
    for each in unread_weights(program):
        if each.constants and not each.equal:
            raise UserError(
                f"The graph does not read {each.weight}: in its place it holds "
                f"{' or '.join(each.constants[:_SHOWN])}, frozen with other values",
                "make it a parameter or a buffer that is read when the graph runs, or load the "
                "weights before the module is traced.",
            )


def refuse_written(program: Any) -> None:
    """Refuse a graph that would write to the module's or the caller's own tensors.

    Raises UserError that names the first one.
    """
    owned = {**program.graph_signature.inputs_to_buffers}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for value, argument in zip(node.args, schema.arguments, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            source = _source(value)
            if source.op == "placeholder":
                written = owned.get(source.name, source.name)
                raise UserError(
                    f"This stage writes to {written} as it runs, which an exported graph would "
                    "lose",
                    "use backend.compile=lazy.",
                )


def _source(node: Any) -> Any:
    """Follow views and in-place operations back to the tensor whose memory they share."""
    while node.op == "call_function":
        returns = node.target._schema.returns if hasattr(node.target, "_schema") else []
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]
    return node
