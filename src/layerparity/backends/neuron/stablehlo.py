"""Compile exported stages to StableHLO, which XLA:CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerparity.backends.graph import states_of
from layerparity.backends.neuron.artefacts import Compiled, GraphCompiler, Runner, versions_of

# The packages whose versions decide what a lowering gives.
DECIDING = ("torch", "torch_xla", "transformers")


@dataclass(frozen=True)
class StableHloCompiler(GraphCompiler):
    """torch_xla's lowering. XLA:CPU makes machine code of it whenever it runs it.

    ``numerics`` are the runtime's flags; ``around`` runs the lowering, which clears torch_xla's
    counters.
    """

    numerics: Mapping[str, str]
    around: Callable[[Callable[[], Any]], Any] = lambda work: work()

    @property
    def versions(self) -> Mapping[str, str]:
        """torch, torch_xla and transformers."""
        return versions_of(DECIDING)

    @property
    def options(self) -> Mapping[str, str]:
        """The runtime's flags, and that XLA is the compiler."""
        return {"compiler": "XLA", **self.numerics}

    def compile(self, program: Any, digest: str) -> Compiled:
        """Lower an exported program to StableHLO's bytecode."""
        compiled: Compiled = self.around(lambda: _lower(program))
        return compiled

    def runner(self, compiled: Compiled) -> Runner:
        """Return what runs bytecode; inputs and outputs lie on the device."""
        import torch_xla

        def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            outputs = torch_xla._XLAC._run_stablehlo(compiled.payload, list(values))
            # They come without a layout, and a lazy gather from one of these aborts the process.
            return [each.cpu().to(each.device) for each in outputs]

        return run


def _lower(program: Any) -> Compiled:
    from torch_xla.stablehlo import StableHLOExportOptions, exported_program_to_stablehlo

    # torch_xla's own decompositions make a safe softmax a plain one: NaN in rows that see no key.
    program = program.run_decompositions()
    # The weights stay where they are: the bundle's own copy goes through numpy, without bfloat16.
    options = StableHLOExportOptions(include_human_readable_text=False, export_weights=False)
    bundle = exported_program_to_stablehlo(program, options)._bundle
    function = bundle.stablehlo_funcs[0]
    known, inputs = states_of(program), []
    constants: list[torch.Tensor] = []
    for place in function.meta.input_locations:
        if place.type_.value == "input_arg":
            inputs.append(place.position)
        elif place.type_.value == "parameter":
            assert place.name in known, f"the lowering made a weight of its own: {place.name}"
            inputs.append(place.name)
        else:
            inputs.append((len(constants),))
            constants.append(torch.from_numpy(bundle.additional_constants[place.position]))
    return Compiled(function.bytecode, tuple(inputs), tuple(constants))
