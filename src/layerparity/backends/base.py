"""What every backend offers: where it can run, where modules go, how tensors get there and back.

A backend's file holds ``Settings`` (a dataclass for conf/backend), ``affinity()``,
``abilities(settings)`` and ``build(settings, config)``. Nothing heavy is imported until ``build``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.machine.device import Placed
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.settings.config import Config


@dataclass(frozen=True)
class RankDevices:
    """What each rank of a model that is split over processes computes on.

    ``device`` is torch's name of it and ``collectives`` torch.distributed's of what joins the
    ranks; ``label`` is what a run says. ``count`` are there; None where any number can be. Ranks
    that are ``launched`` find torchrun's variables, and each other by them, at env://.
    """

    device: str
    collectives: str
    label: str
    count: int | None = None
    launched: bool = False


@dataclass(frozen=True)
class DeviceShare:
    """The devices that one process takes: ``count`` of ``devices``, as ``variable`` names them."""

    variable: str
    devices: list[str]
    count: int


@dataclass(frozen=True)
class Abilities:
    """What a backend says of itself; others ask this, never its name. Defaults promise nothing."""

    kind: RunKind = RunKind.candidate
    """What a run makes where nobody says."""
    eager: bool = False
    """torch computes operation by operation, so that a port can choose the order of a sum."""
    references: bool = False
    """A golden run may evaluate its stages again beside itself, wider and in other ways."""
    settings_once: bool = False
    """A process reads the settings once: runs with others need a process of their own."""
    one_device: bool = False
    """Every stage goes to one device, whatever device_map says."""
    memory_known: bool = False
    """The free memory of its devices can be asked for, as of NVIDIA's."""
    experts: str | None = None
    """The implementation of experts where none is asked for."""
    libraries: tuple[str, ...] = ()
    """What it imports that takes seconds."""
    gpu_compiler: str = ""
    """The package that compiled stages need on a GPU."""
    nxdi: bool = False
    """Its devices are Neuron cores, over which AWS's inference library lays a model."""
    ranks: Callable[[Config], RankDevices] | None = None
    """What processes of transformers' own plan compute on, for tp_degree above 1; None where the
    backend splits a model in one process, or not at all."""
    share: Callable[[Config], DeviceShare | None] | None = None
    """Which devices a run takes, so that processes beside each other each get their own; None where
    it takes none in particular."""


@dataclass
class Backend(ABC):
    """One kind of machine, opened for one run.

    ``warnings`` collects what a library said when it changed the layout or the numerics;
    ``streams`` says that a stage's weights are there only while it runs, ``again`` that
    the stages run once more for every token, ``ahead`` that
    the next one's may be read meanwhile; ``unused`` are keys of a command that change nothing here.
    """

    name: str = ""
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    warnings: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    streams: bool = False
    ahead: bool = False
    again: bool = False

    @abstractmethod
    def open(self) -> None:
        """Make the machine ready (environment, device). Raises UserError with the cure."""

    @abstractmethod
    def close(self) -> None:
        """Give back what `open` took; safe to call twice."""

    def note(self, text: str) -> None:
        """Say a line, and keep it with what the run was warned of."""
        console.note(text)
        self.warnings.append(text)

    @property
    @abstractmethod
    def device_label(self) -> str:
        """What the run really ran on, such as ``cpu`` or ``XLA:CPU, not Neuron``."""

    @property
    def device_types(self) -> frozenset[str]:
        """Torch's names of what its stages compute on, such as ``cuda``; empty where unknown."""
        return frozenset()

    @property
    def spreads(self) -> bool:
        """Whether stages compute on more than one device."""
        return False

    def check(self, model: nn.Module) -> None:  # noqa: B027
        """Refuse, with the cure, a model this backend cannot run as asked (tp_degree, heads)."""

    @abstractmethod
    def place(self, model: nn.Module, stages: Mapping[str, str]) -> list[Placed]:
        """Decide where each stage goes. ``stages`` maps a stage to its module path in ``model``.

        ``model`` is the whole architecture on the meta device: nothing is read or moved.
        """

    @abstractmethod
    def put(self, stage: str, module: nn.Module) -> None:
        """Move a stage's loaded module (on the CPU until now) to its place, in-place."""

    def release(self, stage: str) -> None:  # noqa: B027
        """Give back what `put` took for a stage."""

    def memory_table(self) -> Sequence[object]:
        """Return a line of text for each device's memory, after stages were put there."""
        return ()

    @abstractmethod
    def send(self, stage: str, value: Any) -> Any:
        """Return tensors, or nested tuples, lists and dicts of them, on the stage's device.

        Shapes and dtypes stay as they are.
        """

    @abstractmethod
    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Synchronise once and return the tensors on the CPU, detached and contiguous.

        Shapes and dtypes stay as they are.
        """

    def compile(self, module: nn.Module, arguments: Sequence[Any]) -> Any:
        """Return a callable like ``module``; backends that compile do it here.

        ``arguments`` are a call's, on the stage's device: (given [batch, token, channel] or ids
        [batch, token], keyword arguments of the block). Raises UserError where it cannot compile.
        """
        return module

    def compiled_otherwise(self) -> dict[str, Backend]:
        """Return this open machine with other ways to compile stages, by what each is called."""
        return {}

    def facts(self) -> dict[str, str]:
        """Return what the run should remember of the machine, as tags."""
        return {}

    def numerics(self) -> dict[str, str]:
        """Return settings that change numbers (flags, precision), for the fingerprint."""
        return {}
