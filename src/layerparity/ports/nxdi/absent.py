"""Stand-ins for AWS's compiled packages, where they are not installed: NxD's CPU mode needs none.

NeuronX Distributed and NxDI are plain Python, but they import the compiler and its kernels. Here
such an import gives a name that may be passed round, decorated with and derived from. Calling it
while a model runs says which kernel is missing. Nothing is installed where the real packages are.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from layerparity.ground.errors import UserError
from layerparity.machine.neuron_packages import looks_real, offer_fx
from layerparity.ports.nxdi.transformers_4 import offer_outputs

COMPILED = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")
# torch_xla asks for this one while it is imported itself, and would believe a stand-in.
_OF_TORCH_XLA = "libneuronxla"


class MissingKernelError(UserError):
    """A model called something of AWS's compiled packages that is not here."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model calls {name}, which is not installed here",
            "switch that kernel off in port.neuron_config, or run where AWS's packages are.",
        )


class Absent:
    """A name of a package that is not here; while `running`, to call it is an error."""

    running = False

    _name: str

    def __init__(self, name: str) -> None:
        self.__dict__.update(_name=name, __name__=name)

    def __getattr__(self, attribute: str) -> Absent:
        # By such names Python asks what an object can do: it can do nothing.
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **named: Any) -> Absent:
        """Stand for what the name would return; raise MissingKernelError while `running`."""
        # Kernels are decorated while their modules are imported, which must go through.
        if Absent.running:
            raise MissingKernelError(self._name)
        return Absent(self._name)

    def __getitem__(self, key: Any) -> Absent:
        return Absent(self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<{self._name}, not installed>"


@contextmanager
def running() -> Iterator[None]:
    """Let a call of an absent name raise MissingKernelError while the block runs."""
    Absent.running = True
    try:
        yield
    finally:
        Absent.running = False


class RmsNorm:
    """What torch_neuronx.xla_impl.ops.RmsNorm computes, in torch."""

    @staticmethod
    def apply(values: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
        """Return ``values * rsqrt(mean(values^2) + eps) * weight``, in the shape of ``values``."""
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)
        return (wide * scale * weight).to(values.dtype)


# What a stand-in module really has.
_PRESENT: dict[str, dict[str, Any]] = {
    # NxD makes its groups by the kind of hardware, which has to be one that it knows.
    "torch_neuronx.utils": {"get_platform_target": lambda *_: "trn2"},
    "torch_neuronx.utils.utils": {"get_platform_target": lambda *_: "trn2"},
    "torch_neuronx.xla_impl.ops": {"RmsNorm": RmsNorm},
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `COMPILED` that are not really installed."""

    def __init__(self) -> None:
        self.absent = {name for name in COMPILED if not looks_real(name)}

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.absent:
            return None
        if name == _OF_TORCH_XLA:
            xla = sys.modules.get("torch_xla")
            if xla is not None and getattr(xla.__spec__, "_initializing", False):
                return None
            if xla is None and importlib.util.find_spec("torch_xla") is not None:
                # Afterwards it has found out for itself that there is no Neuron here.
                importlib.import_module("torch_xla")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_PRESENT.get(module.__name__, {}))


def install() -> None:
    """Let AWS's compiled packages be imported where they are not installed; once in a process."""
    if any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    finder = _Finder()
    for name in [name for name in sys.modules if name.partition(".")[0] in finder.absent]:
        del sys.modules[name]
    # In front, for PyPI has placeholders of these names that raise when they are imported.
    sys.meta_path.insert(0, finder)
    classes: Any = torch.classes
    # NxD names classes of AWS's compiled library while it is imported.
    classes.neuron = Absent("torch.classes.neuron")
    offer_fx()
    offer_outputs()


def without_markers(package: str) -> None:
    """Let the wrappers that mark a layer for the compiler pass on what they are given."""
    marker = f"{package}.models.layer_boundary_marker"
    if marker not in sys.modules:
        return
    module = sys.modules[marker]
    for name in ("ModuleMarkerStartWrapper", "ModuleMarkerEndWrapper"):
        wrapper = getattr(module, name, None)
        if wrapper is not None:
            wrapper.forward = _pass_on


def _pass_on(self: Any, *values: Any) -> Any:
    return values[0] if len(values) == 1 else values
