"""A stage of a rank as a module that a compiler traces: what is observed is among its outputs.

A compiled graph has no hooks. They work while it is traced, and what they see then is returned.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from layerparity.anatomy.family import Tap
from layerparity.ground.files import text_digest
from layerparity.ports.nxdi.passes import NxdiPass
from layerparity.ports.nxdi.sites import NxdiWatched

# How deep a configuration's own configurations are looked into.
_DEPTH = 6
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class BlockModule(nn.Module):
    """A model of one block: returns the block's output, and the sites that ``shown`` names then."""

    def __init__(
        self, model: Any, now: NxdiPass, names: Mapping[str, str], taps: Sequence[Tap]
    ) -> None:
        super().__init__()
        self.model = model
        self._now, self._names, self._taps = now, names, taps
        self.shown: tuple[str, ...] = ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return [batch, token, channel], and each site as NxDI has it on this rank."""
        watched = NxdiWatched(self.model.layers[0], self._names, self._taps)
        with watched.watching():
            output = self._now.through(
                self.model, hidden_states, attention_mask, position_ids, cached=False
            )
        # A compiled graph hands out tensors without names: they are those of this moment.
        wanted = {tap.local for tap in self._taps}
        self.shown = tuple(each for each in watched.seen if each in wanted)
        return (output, *(watched.seen[each] for each in self.shown))


class OutsideModule(nn.Module):
    """A model's embedding, last norm or head alone."""

    shown: tuple[str, ...] = ()

    def __init__(self, model: Any, stage: str) -> None:
        super().__init__()
        self.model, self._stage = nn.ModuleDict({stage: getattr(model, stage)}), stage

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the stage's output for [batch, token, channel], or ids int32 [batch, token]."""
        output = self.model[self._stage](hidden_states)
        return (output[0] if isinstance(output, tuple) else output,)


def graph_key(module: nn.Module, stage: str, config: Any, *given: Any) -> str:
    """Return the hash of what decides a stage's graph: all but its weights' values.

    That is the modules' classes, settings and shapes, the model's configuration, buffers that are
    no weights by value, and what is ``given``: the sources' hash, the sites, the inputs' shapes.
    Blocks that differ in a setting of a module (its own number, say) have graphs of their own.
    """
    outside = {"stage": stage} if isinstance(module, OutsideModule) else {}
    # Only what is in the state dict is given to a graph as a weight.
    stored = set(module.state_dict())
    told = {
        **outside,
        "config": _told(config, _DEPTH),
        "modules": [(n, _settings(each)) for n, each in module.named_modules()],
        "tensors": [
            (name, str(value.dtype), list(value.shape), _values(value, name in stored))
            for name, value in (*module.named_parameters(), *module.named_buffers())
        ],
        "given": [_told(each, _DEPTH) for each in given],
    }
    return text_digest(json.dumps(told, sort_keys=True))


def _values(value: torch.Tensor, is_weight: bool) -> str:
    if is_weight:
        return ""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(blake3(data.numpy().tobytes()).hexdigest())


def _settings(module: nn.Module) -> Any:
    """Return a module's class and those of its attributes that are settings."""
    hidden = {name for name in vars(module) if name.startswith("_")}
    # `shown` is filled by the trace, so it is no setting.
    own = {n: v for n, v in vars(module).items() if n not in hidden and n != "shown"}
    return [_name(type(module)), {name: _told(value, 1) for name, value in sorted(own.items())}]


def _told(value: Any, depth: int) -> Any:
    """Return a setting as JSON: the same in every process, whatever it is made of."""
    # An object's repr may hold an address, and the key must be the same in every process.
    told: Any = [_name(type(value))]
    if isinstance(value, enum.Enum):
        told.append(value.name)
    elif isinstance(value, _PLAIN):
        told = value if isinstance(value, bool | int | str | None) else str(value)
    elif isinstance(value, torch.Tensor):
        told = _values(value, is_weight=False)
    elif isinstance(value, Mapping):
        told = {str(name): _told(each, depth) for name, each in value.items()}
    elif isinstance(value, list | tuple):
        told = [_told(each, depth) for each in value]
    elif isinstance(value, set | frozenset):
        told = sorted(str(each) for each in value)
    elif hasattr(value, "__qualname__"):
        told = _name(value)
    elif hasattr(value, "__dict__") and depth > 1:
        told.append(_told(vars(value), depth - 1))
    return told


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
