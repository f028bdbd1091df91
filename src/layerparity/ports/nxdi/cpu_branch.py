"""The branch that an NxDI model takes in NxD's CPU mode, where it may run other code than Neuron's.

A model asks ``cpu_mode()`` for it: transformers' own norm for a kernel's, all heads on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

from layerparity.ports.nxdi import CPU_MODE
from layerparity.ports.nxdi.application import Application

# Where NxDI keeps its models; what is beside them asks for what no CPU can do otherwise.
_MODELS = ".models."


def asking(application: Application) -> list[ModuleType]:
    """Return the imported modules of models that may choose other code on CPUs."""
    top = application.cls.__module__.partition(".")[0]
    return [
        module
        for name, module in sorted(sys.modules.items())
        if (_MODELS in name or name.partition(".")[0] == top != application.package)
        and callable(vars(module).get(CPU_MODE))
    ]


def take_devices(modules: Iterable[ModuleType]) -> None:
    """Let models run the branch for devices, wherever they ask by a name of their own module."""
    for module in modules:
        setattr(module, CPU_MODE, lambda: False)
