"""The native flavour: torch's own device ``neuron``, or torch's CPU device as a stand-in.

Modules run eagerly, operation by operation, as on any device of torch; nothing here imports
torch_xla. What AWS documents is used and no more, for none of it has run on hardware: the device
and its ``synchronize``, the process group ``neuron``, ``torch.compile(backend="neuron")``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.backends import switches
from layerparity.backends.neuron.compiler_options import CC_FLAGS, LNC_VARIABLE, Compile
from layerparity.backends.neuron.runtime import Runtime
from layerparity.machine import neuron_packages
from layerparity.machine.neuron import NATIVE_STAND_IN, NEURON

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.backends.neuron.artefacts import GraphCompiler

# The stand-in's compiler runs all of torch.compile but the part that makes machine code.
COMPILERS = {"neuron": "neuron", "cpu": "aot_eager"}
# What changes numbers on the device, where the environment has it.
_NUMERIC_VARIABLES = (
    CC_FLAGS,
    LNC_VARIABLE,
    "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
)


class NativeRuntime(Runtime):
    """Torch's eager tensors on one device.

    It takes no part in a process group: several ranks are processes of their own
    (`layerparity.ports.known._hf_rank`), and transformers' modules ask for none.
    """

    def __init__(self, is_neuron: bool, lnc: int | None = None) -> None:
        self.is_neuron = is_neuron
        self.lnc = lnc
        self._before: tuple[switches.Switches, str | None] | None = None
        self._started: int | None = None
        self._fell_before: Counter[str] = Counter()

    @property
    def device_label(self) -> str:
        """``Neuron``, or ``torch's CPU device, not Neuron``."""
        return NEURON if self.is_neuron else NATIVE_STAND_IN

    @property
    def device_type(self) -> str:
        """``neuron``, or ``cpu`` for the stand-in."""
        return "neuron" if self.is_neuron else "cpu"

    @property
    def why_alone(self) -> str:
        """Who starts ranks here."""
        return "the native runtime starts its ranks itself"

    def prepare(self) -> None:
        """Forbid what torch may round away, and ask Neuron's runtime for the cores of ``lnc``."""
        self._before = switches.set_exact(None), os.environ.get(LNC_VARIABLE)
        if self.lnc is not None and self.is_neuron:
            os.environ[LNC_VARIABLE] = str(self.lnc)

    def restore(self) -> None:
        """Set torch's switches and the variable back."""
        if self._before is None:
            return
        before, lnc = self._before
        switches.restore(before)
        os.environ.pop(LNC_VARIABLE, None)
        if lnc is not None:
            os.environ[LNC_VARIABLE] = lnc
        self._before = None

    def load(self) -> None:
        """Import torch_neuronx on Neuron. Raises UserError where it brings no device."""
        if self.is_neuron:
            neuron_packages.native()

    def start(self) -> None:
        """Remember where the counters stand; the first tensor takes the device."""
        # The counters are of the whole process, which may have compiled before.
        self._started = _graphs()
        self._fell_before = (neuron_packages.fallbacks() if self.is_neuron else None) or Counter()

    def world_size(self) -> int:
        """Return 1: this process is in no group."""
        return 1

    def move(
        self, module: nn.Module, shards: Mapping[str, int], experts: Collection[str] = ()
    ) -> None:
        """Move a module to the device in place; nothing is split within a process."""
        assert not shards, "ranks split what they hold by themselves"
        module.to(self.device_type)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of any shape and dtype, on the device.

        The stand-in gets memory of its own, as a device has: what writes there is not seen here.
        """
        return tensor.to(self.device_type, copy=not self.is_neuron)

    def sync(self) -> None:
        """Wait until the device has done what it was given; the CPU always has."""
        if self.is_neuron:
            import torch

            torch.neuron.synchronize()  # type: ignore[attr-defined]

    def graph_compiler(self, work: Path | None) -> GraphCompiler:
        """Return ``torch.compile`` by the device's own backend."""
        from layerparity.backends.neuron.native_graph import NativeCompiler

        return NativeCompiler(COMPILERS[self.device_type], self.numerics())

    def compiled_by(self, mode: Compile) -> str:
        """Return ``eager``, or torch.compile with its backend."""
        if mode is Compile.lazy:
            return "eager"
        return f"torch.compile {COMPILERS[self.device_type]}"

    def counters(self) -> dict[str, Any]:
        """Return the graphs that torch.compile made since `start`.

        With them the operations that Neuron left to the CPU, where the package tells them.
        """
        counted = {"compiles": 0 if self._started is None else _graphs() - self._started}
        fell = self._fallbacks()
        if fell is None:
            return counted
        return {**counted, "aten_fallbacks": fell.total(), "aten_names": sorted(fell)}

    def _fallbacks(self) -> Counter[str] | None:
        """Return what ran on the CPU instead since `start`; None where nothing tells it."""
        if not self.is_neuron or self._started is None:
            return None
        self.sync()
        fell = neuron_packages.fallbacks()
        return None if fell is None else fell - self._fell_before

    def facts(self) -> dict[str, str]:
        """Return the package's version, the device, what was compiled and what ran on the CPU."""
        if self._started is None:
            return {}
        counted = self.counters()
        names = counted.get("aten_names")
        fell = "not told" if names is None else ",".join(names) or "none"
        return {
            **neuron_packages.versions(),
            "native_device": self.device_type,
            "compiles": str(counted["compiles"]),
            **({"aten_fallbacks": fell} if self.is_neuron else {}),
        }

    def numerics(self) -> dict[str, str]:
        """Return torch's switches, and on Neuron the variables that change numbers."""
        found: dict[str, str | None] = {}
        if self.is_neuron:
            found = {name: os.environ.get(name) for name in _NUMERIC_VARIABLES}
            found |= {LNC_VARIABLE: str(self.lnc)} if self.lnc is not None else {}
        given = {name: value for name, value in found.items() if value is not None}
        return {"runtime": "native", **switches.described(on_cuda=False), **given}


def _graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
