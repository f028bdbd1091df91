"""The backend of a port that computes in processes of its own: it takes no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.backends.base import Backend
from layerparity.machine.device import Placed, keep_torch_xla_out
from layerparity.machine.max_memory import STREAM

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.settings.config import Config


def from_config(config: Config, device: str, *, mapped: bool) -> RanksBackend:
    """Return the backend of a configuration; ``device`` is what the port computes on.

    ``mapped`` says that the port goes by ``device_map``.
    """
    keep_torch_xla_out()
    streams = config.device_map.strategy == STREAM
    return RanksBackend(
        name=config.backend.name,
        unused=() if streams or mapped else ("device_map",),
        streams=streams,
        again=config.generate.max_new_tokens > 1,
        device=device,
    )


@dataclass
class RanksBackend(Backend):
    """What a run needs of a machine where its port starts the processes that compute."""

    device: str = ""
    _closing: list[Callable[[], None]] = field(default_factory=list)
    _facts: Callable[[], Mapping[str, str]] = dict

    def serve(self, close: Callable[[], None], facts: Callable[[], Mapping[str, str]]) -> None:
        """Call ``close`` when the run ends, and take its facts from ``facts``."""
        self._closing.append(close)
        self._facts = facts

    def open(self) -> None:
        """Take nothing."""

    def close(self) -> None:
        """End the port's processes."""
        while self._closing:
            self._closing.pop()()

    @property
    def device_label(self) -> str:
        """What the port computes on."""
        return self.device

    @property
    def device_types(self) -> frozenset[str]:
        """``cpu``: what ranks computed comes back to the CPU."""
        return frozenset({"cpu"})

    def place(self, model: nn.Module, stages: Mapping[str, str]) -> list[Placed]:
        """Place nothing: the port does."""
        return []

    def put(self, stage: str, module: nn.Module) -> None:
        """Leave the module where it is."""

    def send(self, stage: str, value: Any) -> Any:
        """Return the value as it is."""
        return value

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors, of any shape and dtype, detached."""
        return {name: each.detach().cpu().contiguous() for name, each in tensors.items()}

    def memory_table(self) -> Sequence[object]:
        """Return nothing: the ranks' memory is theirs."""
        return ()

    def facts(self) -> dict[str, str]:
        """Return what the ranks said of themselves when they started."""
        return dict(self._facts())
