"""Find the Neuron devices and AWS's packages on this machine, and which runtime they make up.

`xla_facts` and `flavour` import what they ask, which may crash: call them in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
from enum import Enum
from pathlib import Path

from layerparity.machine import neuron_packages
from layerparity.machine.device import Affinity

NEURON = "Neuron"
STAND_IN = "XLA:CPU, not Neuron"
DEVICE_FILES = Path("/dev")

GET_XLA = (
    "on Linux x86_64, pip install torch==2.9.1 torch_xla==2.9.0 gets it, with XLA:CPU as a "
    "stand-in for Neuron; on Trainium, install torch-neuronx 2.9 and neuronx-distributed from "
    "AWS's own index"
)
USE_STAND_IN = "for the stand-in, use backend.runtime=xla_cpu"


class RuntimeChoice(Enum):
    """conf/backend's ``runtime``. auto: Neuron devices where there are any, else XLA:CPU."""

    auto = "auto"
    xla = "xla"
    xla_cpu = "xla_cpu"


def neuron_devices(folder: Path | None = None) -> int:
    """Return the number of Neuron devices the driver shows, in ``/dev`` or another folder."""
    return len(list((DEVICE_FILES if folder is None else folder).glob("neuron[0-9]*")))


def detect(choice: RuntimeChoice = RuntimeChoice.auto) -> Affinity:
    """Return which machine a choice gives here, cheaply: neither torch nor torch_xla is imported.

    A score of 0 has a cure; 1 is the stand-in, 2 is Neuron itself.
    """
    if importlib.util.find_spec("torch_xla") is None:
        return Affinity(0, "none", "torch_xla is not installed", f"{GET_XLA}.")
    asked = os.environ.get("PJRT_DEVICE")
    if asked not in (None, "CPU", "NEURON"):
        found = f"PJRT_DEVICE={asked} is not Neuron"
        return Affinity(0, asked or "", found, "unset PJRT_DEVICE.")
    count = neuron_devices()
    if choice is RuntimeChoice.xla_cpu or (
        choice is RuntimeChoice.auto and (asked == "CPU" or not (count or asked))
    ):
        if asked == "NEURON":
            why = "PJRT_DEVICE=NEURON contradicts runtime=xla_cpu"
            return Affinity(0, STAND_IN, why, "unset it.")
        why = f"asked for beside {count} Neuron devices" if count else "no Neuron device here"
        return Affinity(1, STAND_IN, f"{why}: XLA:CPU runs the same code path")
    return _neuron(asked, count)


def _neuron(asked: str | None, count: int) -> Affinity:
    """Return how Neuron itself fits, where it is asked for or there are devices."""
    if asked == "CPU":
        return Affinity(0, NEURON, "PJRT_DEVICE=CPU contradicts runtime=xla", "unset it.")
    if not count:
        where = DEVICE_FILES / "neuron*"
        return Affinity(0, NEURON, f"There is no Neuron device at {where}; {USE_STAND_IN}.")
    if not neuron_packages.looks_real("torch_neuronx"):
        return Affinity(
            0,
            NEURON,
            f"{count} Neuron devices are here, but torch_neuronx is missing or PyPI's placeholder",
            f"install it from AWS's own index; {USE_STAND_IN}.",
        )
    return Affinity(2, NEURON, f"{count} Neuron devices")


# What each is imported as, and what it is installed as.
PACKAGES = {
    "torch_neuronx": "torch-neuronx",
    "neuronx_distributed": "neuronx-distributed",
    "neuronxcc": "neuronx-cc",
    "libneuronxla": "libneuronxla",
}
XLA = "XLA flavour"
NATIVE = "native flavour"


def packages() -> dict[str, bool]:
    """Return which of AWS's packages are here, and whether each is more than a placeholder."""
    here = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    return {name: neuron_packages.looks_real(name) for name in here}


def flavour() -> dict[str, str]:
    """Return ``flavour``, ``found`` and ``cure`` of the torch_neuronx that imports here."""
    try:
        module = neuron_packages.torch_neuronx()
    except neuron_packages.NativeFlavourError as error:
        return {"flavour": NATIVE, "found": error.found, "cure": error.cure}
    if module is None:
        raise ImportError("torch_neuronx has no torch_neuronx.trace, or does not import")
    return {"flavour": XLA, "found": str(getattr(module, "__version__", "?")), "cure": ""}


def xla_facts() -> dict[str, str]:
    """Return torch_xla's version and device. Imports torch_xla (seconds)."""
    if not neuron_devices():
        os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    return {"version": torch_xla.__version__, "device": str(torch_xla.device())}
