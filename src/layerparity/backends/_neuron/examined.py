"""Examined: what AWS's packages and torch_xla say of themselves, for a look at a machine.

`xla_facts` and `flavour` import what they ask, which may crash: call them in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os

from layerparity.backends._neuron import neuron_packages
from layerparity.backends._neuron.runtime import neuron_devices
from layerparity.errors import UserError

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
    found = {name: importlib.util.find_spec(name) is not None for name in PACKAGES}
    return {name: neuron_packages.looks_real(name) for name, here in found.items() if here}


def flavour() -> dict[str, str]:
    """Return ``flavour``, ``found`` and ``cure`` of the torch_neuronx that imports here."""
    try:
        module = neuron_packages.torch_neuronx()
    except UserError as error:
        found, _, cure = str(error).partition(": ")
        return {"flavour": NATIVE, "found": found, "cure": cure}
    if module is None:
        raise ImportError("torch_neuronx has no torch_neuronx.trace, or does not import")
    return {"flavour": XLA, "found": str(getattr(module, "__version__", "?")), "cure": ""}


def xla_facts() -> dict[str, str]:
    """Return torch_xla's version and device. Imports torch_xla (seconds)."""
    if not neuron_devices():
        os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    return {"version": torch_xla.__version__, "device": str(torch_xla.device())}
