"""Evaluate: a port's loaded stages, computed once more in another clean way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from layerparity.models.families.base import EXPERTS
from layerparity.numerics.perturb import perturbed
from layerparity.numerics.replay import Replay
from layerparity.numerics.ways import Way
from layerparity.ports._observe import ObservedStage
from layerparity.ports.base import Call, Observed
from layerparity.ports.hf import HfPort, after_of, taps_of

if TYPE_CHECKING:
    from torch import nn

SCORES = "mlp.gate:scores"
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Evaluator(HfPort):
    """One way of computing what a port has loaded, with masks and a cache of its own.

    In the port's own floating type or a wider one the port's own modules run; for a narrower
    ``dtype`` a stage is copied into it until it is forgotten.
    """

    def __init__(self, port: HfPort, way: Way, dtype: torch.dtype | None = None) -> None:
        self.__dict__.update(port.__dict__)
        # sdpa knows no sinks and no soft cap: where transformers refuses it, it computes wrongly.
        lacks = way.attention == "sdpa" and not port.skeleton.model._supports_sdpa
        self.way = replace(way, attention=None) if lacks else way
        self._narrow = dtype if dtype not in (None, port.skeleton.dtype) else None
        self._stages, self._taps, self._sent = {}, {}, {}
        self._arguments, self._call = [], None

    @property
    def dtype(self) -> torch.dtype:
        """The floating type the way computes in."""
        return self.way.wide or self._narrow or self.skeleton.dtype

    def begin(self, call: Call) -> None:
        """Prepare a pass as this way's implementations and type want it."""
        with self.way.around(self.skeleton.config):
            super().begin(call)

    @property
    def cache(self) -> Any:
        """The cache of the pass that was begun, or None."""
        return self._call.cache if self._call is not None else None

    def load(self, stage: str) -> dict[str, str]:
        """Take the stage as it is loaded; nothing is read."""
        module = self.skeleton.module(stage)
        if self._narrow is not None:
            module = self._copy(module)
        self._taps[stage] = taps_of(self.assets.family, self.skeleton, stage, self.assets.wanted)
        after = after_of(self.assets.family, self.skeleton, stage)
        self._stages[stage] = _plain(ObservedStage(module, self._taps[stage], after))
        return {}

    def release(self, stage: str) -> None:
        """Forget the stage; its weights are the port's."""
        self._stages.pop(stage, None)

    def evaluate(self, stage: str, given: torch.Tensor, choices: torch.Tensor | None) -> Observed:
        """Run a stage with another run's routing, ``choices`` int64 [batch, token, k].

        The scores that the router chose from are observed as well, at `SCORES`.
        """
        flat = None if choices is None else choices.flatten(0, 1)
        replay = Replay(flat, expert_count(self.skeleton.config))
        given = given.to(self.dtype) if given.is_floating_point() else given
        if self.way.perturbs:
            given = perturbed(given, sum(stage.encode()))
        with self.way.around(self.skeleton.config), replay:
            observed = self.run(stage, given)
        if replay.scores is not None and self._call is not None:
            scores = replay.scores.detach().cpu()
            observed.tensors[SCORES] = scores.reshape(self._call.batch, self._call.tokens, -1)
            observed.specs[SCORES] = EXPERTS
        return observed

    def _copy(self, module: nn.Module) -> nn.Module:
        """Return a copy in the narrow type; what the family keeps in float32 stays so."""
        twin = copy.deepcopy(module).to(self._narrow)
        kept = self.skeleton.float32_patterns
        for name, tensor in module.state_dict().items():
            if any(fnmatchcase(f".{name}", pattern) for pattern in kept):
                owner, _, leaf = name.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, tensor)
        return twin


def expert_count(config: Any) -> int:
    """Return how many experts a router chooses from, 0 for a dense model."""
    return next((int(n) for key in _COUNTS if (n := getattr(config, key, None))), 0)


def _plain(module: ObservedStage) -> Callable[..., Any]:
    # A module would be compiled by the backend; what sets the scale is computed as it is written.
    return module.__call__
