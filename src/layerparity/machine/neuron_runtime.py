"""Runtime: what the neuron backend needs of a machine, and which machine this is.

The XLA flavour is `xla.XlaRuntime`, on Neuron devices or on XLA:CPU as a stand-in. Another flavour
is one more file with one more subclass.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.machine import neuron
from layerparity.machine.device import Affinity

if TYPE_CHECKING:
    import torch
    from torch import nn

NEURON = "Neuron"
STAND_IN = "XLA:CPU, not Neuron"
DEVICE_FILES = Path("/dev")

GET_XLA = (
    "on Linux x86_64, pip install torch==2.9.1 torch_xla==2.9.0 gets it, with XLA:CPU as a "
    "stand-in for Neuron; on Trainium, install torch-neuronx 2.9 and neuronx-distributed from "
    "AWS's own index"
)
USE_STAND_IN = "for the stand-in, use backend.runtime=xla_cpu"


class Choice(Enum):
    """conf/backend's ``runtime``. auto: Neuron devices where there are any, else XLA:CPU."""

    auto = "auto"
    xla = "xla"
    xla_cpu = "xla_cpu"


class Compile(Enum):
    """conf/backend's ``compile``. lazy: XLA's lazy tensors; export: one StableHLO graph a stage."""

    lazy = "lazy"
    export = "export"


class Runtime(ABC):
    """One way to run tensors on Neuron, or on what stands in for it."""

    tp_degree: int = 1
    is_neuron: bool = False

    @property
    @abstractmethod
    def spmd(self) -> bool:
        """Whether one process drives all shards, so that there are no ranks."""

    @abstractmethod
    def prepare(self) -> None:
        """Set environment variables, before anybody imports the runtime's packages."""

    def restore(self) -> None:  # noqa: B027
        """Set the environment variables back to what they were before `prepare`."""

    @abstractmethod
    def load(self) -> None:
        """Import the packages and make torch.distributed's ``xla`` backend known."""

    @abstractmethod
    def start(self) -> None:
        """Take the device. Raises UserError where what was granted is not what was asked."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes among which device collectives really happen."""

    @abstractmethod
    def move(self, module: nn.Module, shards: Mapping[str, int]) -> None:
        """Move a module to the device in place; split each named parameter along its dimension."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device."""

    @abstractmethod
    def sync(self) -> None:
        """Compile and launch everything that is pending."""

    @abstractmethod
    def export(self, module: nn.Module) -> Callable[..., Any]:
        """Return a callable like the module that runs as one compiled graph."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return ``compiles``, ``aten_fallbacks`` (how many) and ``aten_names`` since `start`."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return versions and what was granted, as tags."""

    @abstractmethod
    def numerics(self) -> dict[str, str]:
        """Return the flags that change numbers; the same before `start` and after it."""


def neuron_devices() -> int:
    """Return the number of Neuron devices the driver shows."""
    return len(list(DEVICE_FILES.glob("neuron[0-9]*")))


def detect(choice: Choice = Choice.auto) -> Affinity:
    """Return which machine a choice gives here, cheaply: neither torch nor torch_xla is imported.

    A score of 0 carries the cure in its reason; 1 is the stand-in, 2 is Neuron itself.
    """
    if importlib.util.find_spec("torch_xla") is None:
        return Affinity(0, "none", f"torch_xla is not installed: {GET_XLA}.")
    asked = os.environ.get("PJRT_DEVICE")
    if asked not in (None, "CPU", "NEURON"):
        return Affinity(0, asked or "", f"PJRT_DEVICE={asked} is not Neuron: unset PJRT_DEVICE.")
    count = neuron_devices()
    if choice is Choice.xla_cpu or (
        choice is Choice.auto and (asked == "CPU" or not (count or asked))
    ):
        return _stand_in(asked, count)
    return _neuron(asked, count)


def _stand_in(asked: str | None, count: int) -> Affinity:
    if asked == "NEURON":
        return Affinity(0, STAND_IN, "PJRT_DEVICE=NEURON contradicts runtime=xla_cpu: unset it.")
    why = f"asked for beside {count} Neuron devices" if count else "no Neuron device here"
    return Affinity(1, STAND_IN, f"{why}: XLA:CPU runs the same code path")


def _neuron(asked: str | None, count: int) -> Affinity:
    if asked == "CPU":
        return Affinity(0, NEURON, "PJRT_DEVICE=CPU contradicts runtime=xla: unset it.")
    if not count:
        where = DEVICE_FILES / "neuron*"
        return Affinity(0, NEURON, f"There is no Neuron device at {where}; {USE_STAND_IN}.")
    if not neuron.looks_real("torch_neuronx"):
        return Affinity(
            0,
            NEURON,
            f"{count} Neuron devices are here, but torch_neuronx is missing or PyPI's placeholder: "
            f"install it from AWS's own index; {USE_STAND_IN}.",
        )
    return Affinity(2, NEURON, f"{count} Neuron devices")
