"""What the neuron backend needs of a machine: a runtime.

The XLA flavour is `xla.XlaRuntime`, on Neuron devices or on XLA:CPU as a stand-in. Another flavour
is one more file with one more subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.run.backends._neuron.artefacts import GraphCompiler


class Runtime(ABC):
    """One way to run tensors on Neuron, or on what stands in for it."""

    tp_degree: int = 1
    moe_ep_degree: int = 1
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
    def move(
        self, module: nn.Module, shards: Mapping[str, int], experts: Collection[str] = ()
    ) -> None:
        """Move a module to the device in place; split each named parameter along its dimension.

        Those of ``experts``, [expert, ...], are shared by number as well, where moe_ep_degree says
        so.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of any shape and dtype, on the device."""

    @abstractmethod
    def sync(self) -> None:
        """Compile and launch everything that is pending."""

    @abstractmethod
    def graph_compiler(self, work: Path | None) -> GraphCompiler:
        """Return what compiles whole stages; one that is asked with a folder may work there.

        With a folder it is the device's own compiler, without one StableHLO's.
        """

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return ``compiles``, ``aten_fallbacks`` (how many) and ``aten_names`` since `start`."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return versions and what was granted, as tags."""

    @abstractmethod
    def numerics(self) -> dict[str, str]:
        """Return the flags that change numbers; the same before `start` and after it."""
