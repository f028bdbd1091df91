"""What the neuron backend needs of a machine: a runtime.

`xla.XlaRuntime` reaches it by torch_xla, on Neuron devices or on XLA:CPU as a stand-in;
`native.NativeRuntime` by torch's own device ``neuron``, or on torch's CPU device as a stand-in.
tests/test_runtime_contract.py holds both to what is said here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.backends.neuron.artefacts import GraphCompiler
    from layerparity.backends.neuron.compiler_options import Compile


class Runtime(ABC):
    """One way to run tensors on Neuron, or on what stands in for it.

    ``host_copies`` is how often the host holds weights that are on their way to the device.
    """

    tp_degree: int = 1
    moe_ep_degree: int = 1
    is_neuron: bool = False
    host_copies: float = 1

    @property
    @abstractmethod
    def device_label(self) -> str:
        """``Neuron``, or a name that says that it is not."""

    @property
    @abstractmethod
    def device_type(self) -> str:
        """Torch's name of what tensors are on: ``xla``, ``neuron``, or the stand-in's."""

    @property
    def process_group(self) -> str | None:
        """Torch.distributed's name of what joins this process to ranks; None where nothing has to.

        Neuron's own modules refuse to be built without, even in a single process.
        """
        return None

    @property
    def why_alone(self) -> str:
        """Why the process cannot be one of a launcher's ranks; empty where it can."""
        return ""

    @abstractmethod
    def prepare(self) -> None:
        """Set what is read once, such as variables, before the runtime's packages are imported."""

    @abstractmethod
    def restore(self) -> None:
        """Set all of it back to what it was before `prepare`."""

    @abstractmethod
    def load(self) -> None:
        """Import the packages, which makes `process_group` known. Raises UserError if it cannot."""

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

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Launch everything that is pending, and return tensors that can be read from one place.

        They have any shape and dtype. What lies in parts on several devices is put together.
        """
        self.sync()
        return dict(tensors)

    @abstractmethod
    def sync(self) -> None:
        """Launch everything that is pending, and wait until it is done."""

    @abstractmethod
    def graph_compiler(self, work: Path | None) -> GraphCompiler:
        """Return what compiles whole stages; one that is asked with a folder may work there.

        With a folder it is one whose graphs can be kept there.
        """

    @abstractmethod
    def compiled_by(self, mode: Compile) -> str:
        """Return what compiles stages in a mode, for the fingerprint."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return ``compiles`` since `start`.

        Where the runtime tells them, ``aten_fallbacks`` (how many) and ``aten_names`` as well: the
        operations that ran on the host.
        """

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return versions and what was granted, as tags."""

    @abstractmethod
    def numerics(self) -> dict[str, str]:
        """Return the flags that change numbers; the same before `start` and after it."""
