"""Find the Neuron devices and AWS's packages on this machine, and which runtime they make up.

The XLA runtime is torch_xla with AWS's XLA flavour, or XLA:CPU as its stand-in. The native runtime
is torch's own device ``neuron``, or torch's CPU device as its stand-in.

`xla_facts` and `flavour` import what they ask, which may crash: call them in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from layerparity.machine import neuron_flavour, neuron_packages
from layerparity.machine.device import Affinity
from layerparity.machine.neuron_defaults import numbers
from layerparity.machine.neuron_flavour import NATIVE_TORCH, Flavour

NEURON = "Neuron"
STAND_IN = "XLA:CPU, not Neuron"
NATIVE_STAND_IN = "torch's CPU device, not Neuron"
DEVICE_FILES = Path("/dev")

GET_XLA = (
    "on Linux x86_64 with Python 3.10 to 3.13, pip install torch==2.9.1 torch_xla==2.9.0 gets it, "
    "with XLA:CPU as a stand-in for Neuron; on Trainium, install torch-neuronx 2.9 and "
    "neuronx-distributed from AWS's own index"
)
USE_STAND_IN = "for the stand-in, use backend.runtime=xla_cpu"
USE_NATIVE_STAND_IN = "for the stand-in, use backend.runtime=native_cpu"
_GET_NATIVE = "install torch-neuronx 2.13 or newer from AWS's own index"


class RuntimeChoice(Enum):
    """conf/backend's ``runtime``.

    auto: the native runtime where AWS's native flavour is installed; else the XLA runtime, on
    Neuron devices where there are any, else on XLA:CPU. Nobody gets native_cpu who did not ask.
    """

    auto = "auto"
    xla = "xla"
    xla_cpu = "xla_cpu"
    native = "native"
    native_cpu = "native_cpu"

    @property
    def is_native(self) -> bool:
        """Whether it is torch's own device, or what stands in for that."""
        return self in (RuntimeChoice.native, RuntimeChoice.native_cpu)


@dataclass(frozen=True)
class NeuronFit(Affinity):
    """How well the backend fits this machine, by the runtime that a choice came to."""

    runtime: RuntimeChoice = RuntimeChoice.auto


def neuron_devices(folder: Path | None = None) -> int:
    """Return the number of Neuron devices the driver shows, in ``/dev`` or another folder."""
    return len(list((DEVICE_FILES if folder is None else folder).glob("neuron[0-9]*")))


def runtime_of(choice: RuntimeChoice) -> RuntimeChoice:
    """Return which runtime a choice comes to here; nothing is imported."""
    if choice is not RuntimeChoice.auto:
        return choice
    package = neuron_flavour.installed()
    if package is not None and package.flavour is Flavour.NATIVE:
        return RuntimeChoice.native
    asked = os.environ.get("PJRT_DEVICE")
    wants_neuron = asked != "CPU" and (neuron_devices() or asked is not None)
    return RuntimeChoice.xla if wants_neuron else RuntimeChoice.xla_cpu


def detect(choice: RuntimeChoice = RuntimeChoice.auto) -> NeuronFit:
    """Return which machine a choice gives here, cheaply: neither torch nor torch_xla is imported.

    A score of 0 has a cure; 1 is a stand-in, 2 is Neuron itself.
    """
    runtime = runtime_of(choice)
    if runtime is RuntimeChoice.native_cpu:
        return _native_stand_in()
    if runtime is RuntimeChoice.native:
        return _native()
    if importlib.util.find_spec("torch_xla") is None:
        # Whoever has or asks for Neuron, or has AWS's package, lacks torch_xla by mistake.
        is_asked = runtime is RuntimeChoice.xla or neuron_devices()
        absent = not (is_asked or neuron_flavour.installed())
        found = "torch_xla is not installed"
        return NeuronFit(0, "none", found, _without_xla(), is_absent=absent, runtime=runtime)
    asked, count = os.environ.get("PJRT_DEVICE"), neuron_devices()
    if asked not in (None, "CPU", "NEURON"):
        found = f"PJRT_DEVICE={asked} is not Neuron"
        return NeuronFit(0, asked or "", found, "unset PJRT_DEVICE.", runtime)
    return (_xla if runtime is RuntimeChoice.xla else _xla_stand_in)(asked, count)


def _xla_stand_in(asked: str | None, count: int) -> NeuronFit:
    """Return how XLA:CPU fits, where it is asked for or there are no devices."""
    runtime = RuntimeChoice.xla_cpu
    if asked == "NEURON":
        why = "PJRT_DEVICE=NEURON contradicts runtime=xla_cpu"
        return NeuronFit(0, STAND_IN, why, "unset it.", runtime)
    why = f"asked for beside {count} Neuron devices" if count else "no Neuron device here"
    return NeuronFit(1, STAND_IN, f"{why}: XLA:CPU runs the same code path", "", runtime)


def _without_xla() -> str:
    """Return the cure where torch_xla is missing; a newer torch has the native stand-in, too."""
    torch = numbers(neuron_flavour.version_of("torch"))
    if torch is None or torch < NATIVE_TORCH:
        return f"{GET_XLA}."
    return (
        f"{USE_NATIVE_STAND_IN}; on Trainium, {_GET_NATIVE} (Python 3.12 to 3.14), or use an "
        "environment with torch 2.9.1 and torch_xla 2.9.0."
    )


def _native_stand_in() -> NeuronFit:
    """Return how torch's CPU device fits: with a torch that the native flavour is made for."""
    version = neuron_flavour.version_of("torch")
    runtime, release = RuntimeChoice.native_cpu, numbers(version)
    if release is None or release < NATIVE_TORCH:
        found = f"The native flavour needs torch 2.13 or newer; this is {version or 'no torch'}"
        cure = f"use an environment with a newer torch; here, {USE_STAND_IN}."
        return NeuronFit(0, NATIVE_STAND_IN, found, cure, runtime)
    found = "torch's CPU device runs the same code path as its neuron device"
    return NeuronFit(1, NATIVE_STAND_IN, found, "", runtime)


def _native() -> NeuronFit:
    """Return how torch's own device ``neuron`` fits, which AWS's native flavour brings."""
    package, count, runtime = neuron_flavour.installed(), neuron_devices(), RuntimeChoice.native
    if package is None:
        found = "torch_neuronx is missing or PyPI's placeholder"
        return NeuronFit(0, NEURON, found, f"{_GET_NATIVE}; {USE_NATIVE_STAND_IN}.", runtime)
    if package.flavour is Flavour.XLA:
        cure = f"use backend.runtime=xla, or {_GET_NATIVE} (Python 3.12 to 3.14)."
        return NeuronFit(0, NEURON, package.text, cure, runtime)
    lacks = neuron_flavour.misfit(package)
    if lacks is not None:
        found, cure = lacks
        return NeuronFit(0, NEURON, found, f"{cure}.", runtime)
    if not count:
        where = DEVICE_FILES / "neuron*"
        found = f"There is no Neuron device at {where}"
        return NeuronFit(0, NEURON, found, f"{USE_NATIVE_STAND_IN}.", runtime)
    return NeuronFit(2, NEURON, f"{count} Neuron devices, {package.text}", "", runtime)


def _xla(asked: str | None, count: int) -> NeuronFit:
    """Return how Neuron itself fits by torch_xla, where it is asked for or there are devices."""
    runtime = RuntimeChoice.xla
    if asked == "CPU":
        why = "PJRT_DEVICE=CPU contradicts runtime=xla"
        return NeuronFit(0, NEURON, why, "unset it.", runtime)
    if not count:
        where = DEVICE_FILES / "neuron*"
        found = f"There is no Neuron device at {where}"
        return NeuronFit(0, NEURON, found, f"{USE_STAND_IN}.", runtime)
    package = neuron_flavour.installed()
    if package is None:
        return NeuronFit(
            0,
            NEURON,
            f"{count} Neuron devices are here, but torch_neuronx is missing or PyPI's placeholder",
            f"install it from AWS's own index; {USE_STAND_IN}.",
            runtime,
        )
    if package.flavour is Flavour.NATIVE:
        return NeuronFit(0, NEURON, package.text, "use backend.runtime=native, or auto.", runtime)
    lacks = neuron_flavour.misfit(package)
    if lacks is not None:
        found, cure = lacks
        return NeuronFit(0, NEURON, found, f"{cure}.", runtime)
    return NeuronFit(2, NEURON, f"{count} Neuron devices", "", runtime)


# What each is imported as, and what it is installed as.
PACKAGES = {
    "torch_neuronx": "torch-neuronx",
    "neuronx_distributed": "neuronx-distributed",
    "neuronxcc": "neuronx-cc",
    "libneuronxla": "libneuronxla",
}


def packages() -> dict[str, bool]:
    """Return which of AWS's packages are here, and whether each is more than a placeholder."""
    here = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    return {name: neuron_packages.looks_real(name) for name in here}


def flavour() -> dict[str, str]:
    """Return ``flavour`` and ``version`` of the torch_neuronx that imports here, by its symbols.

    ``device`` is empty where the native flavour gave torch no device.
    """
    module = importlib.import_module("torch_neuronx")
    version = str(getattr(module, "__version__", "?"))
    if callable(getattr(module, "trace", None)):
        return {"flavour": Flavour.XLA.value, "version": version, "device": "xla"}
    device = "neuron" if neuron_packages.brings_device() else ""
    return {"flavour": Flavour.NATIVE.value, "version": version, "device": device}


def xla_facts() -> dict[str, str]:
    """Return torch_xla's version and device. Imports torch_xla (seconds)."""
    if not neuron_devices():
        os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    return {"version": torch_xla.__version__, "device": str(torch_xla.device())}
