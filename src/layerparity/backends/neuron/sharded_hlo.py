"""Compile exported stages over several devices of one process: HLO that says how it is split.

XLA:CPU's partitioner cuts such a graph into one for each device as it runs it. torch_xla runs
StableHLO on one device alone, and its own persistent cache cannot read back what it wrote for
XLA:CPU, so the graph is kept as HLO and put into the lazy graph as one operation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from layerparity.backends.graph import states_of
from layerparity.backends.neuron.artefacts import Compiled, GraphCompiler, Runner, versions_of
from layerparity.backends.neuron.stablehlo import DECIDING
from layerparity.backends.neuron.xla_counters import compiles_and_fallbacks
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest

# What a lazy graph calls the operation that is a whole stage.
_OPERATION = "layerparity::stage"
# Letters of a hash that tells one plan from another.
_SHORT = 8


@dataclass(frozen=True)
class ShardedHloCompiler(GraphCompiler):
    """torch_xla's lowering to HLO, with the sharding of every weight and argument in it.

    ``numerics`` are the runtime's flags; ``tp_degree`` is the number of devices in its mesh.
    """

    numerics: Mapping[str, str]
    tp_degree: int

    @property
    def versions(self) -> Mapping[str, str]:
        """torch, torch_xla and transformers."""
        return versions_of(DECIDING)

    @property
    def options(self) -> Mapping[str, str]:
        """The runtime's flags, and that XLA is the compiler."""
        return {"compiler": "XLA", **self.numerics}

    def layout(self, program: Any) -> str:
        """Return the degree, and a hash of which weights are split along which dimension.

        Two checkpoints of one architecture may have two plans of tensor parallelism.
        """
        # Arguments come as the stage before left them; XLA splits them anew as the weights are.
        specs = {n: _spec(v) for n, v in _inputs(program).items() if isinstance(n, str)}
        split = {name: spec for name, spec in specs.items() if "devices=" in spec}
        plan = text_digest(json.dumps(split, sort_keys=True))
        return f"{self.tp_degree} by plan {plan[:_SHORT]}"

    def compile(self, program: Any, digest: str) -> Compiled:
        """Lower an exported program to HLO. Raises UserError where a part of it ran on the host."""
        import torch_xla
        from torch_xla.stablehlo import XLAExportInterpreter

        program = program.run_decompositions()
        device = torch_xla.device()
        inputs = _inputs(program)
        # What lies on the device by then is an input of the graph, all else a part of it. Lowering
        # one that is still being computed ends the process.
        torch_xla.sync(wait=True)
        before = compiles_and_fallbacks()[1]
        interpreter = XLAExportInterpreter(program.graph_module, device, [], None)
        with torch.no_grad():
            # The inputs are the flat graph's; torch.fx would take them for the module's arguments.
            outputs = interpreter.run(*inputs.values(), enable_io_processing=False)
        if new := sorted(compiles_and_fallbacks()[1] - before):
            raise UserError(
                f"{', '.join(new)} would run on the host, so this stage is not one graph",
                "use backend.compile=lazy.",
            )
        context = torch_xla._XLAC.lowering.LoweringContext("Stage")
        context.build(list(outputs))
        return _compiled(context, inputs)

    def runner(self, compiled: Compiled) -> Runner:
        """Return what runs HLO; inputs and outputs lie on the devices, in any sharding."""
        import torch_xla
        from torch_xla.core.xla_builder import computation_from_module_proto

        stage = computation_from_module_proto(_OPERATION, compiled.payload)

        def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            # Constants were kept on the CPU.
            sent = [each.to(torch_xla.device()) for each in values]
            outputs: list[torch.Tensor] = torch_xla._XLAC._xla_user_computation(
                _OPERATION, sent, stage
            )
            return outputs

        return run


def _spec(tensor: torch.Tensor) -> str:
    """Return how XLA has split a tensor; empty, or ``replicated``, for one that is whole."""
    import torch_xla

    spec: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return spec


def _inputs(program: Any) -> dict[int | str, Any]:
    """Return what a program's graph takes, in its order: arguments by place, states by name.

    Tensors are on the device.
    """
    import torch_xla
    from torch.export.graph_signature import InputKind

    states, leaves = states_of(program), iter(pytree.tree_leaves(program.example_inputs))
    inputs: dict[int | str, Any] = {}
    arguments = 0
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs[arguments] = next(leaves)
            arguments += 1
        else:
            inputs[spec.target] = states[spec.target]
    device = torch_xla.device()
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def _compiled(context: Any, inputs: Mapping[int | str, Any]) -> Compiled:
    """Return a lowered graph, with each of its parameters by what it is.

    What is neither an argument nor a state is a number that torch_xla made a tensor of.
    """
    parameters: dict[int, torch.Tensor] = context.device_parameter_id_tensor_mapping()
    tensors = {name: v for name, v in inputs.items() if isinstance(v, torch.Tensor)}
    places = {context.tensor_parameter_id(value): name for name, value in tensors.items()}
    named: list[int | str | tuple[int]] = []
    constants: list[torch.Tensor] = []
    for number in range(len(parameters)):
        if number in places:
            named.append(places[number])
        else:
            named.append((len(constants),))
            constants.append(parameters[number].cpu())
    return Compiled(context.hlo(), tuple(named), tuple(constants))
