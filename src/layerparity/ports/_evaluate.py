"""Evaluate: a port's loaded stages, computed once more in another clean way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from layerparity.errors import UserError
from layerparity.models.families.base import EXPERTS
from layerparity.models.prints import offloaded
from layerparity.numerics.perturb import perturbed
from layerparity.numerics.replay import Replay
from layerparity.numerics.ways import Way
from layerparity.ports._inside import expert_count
from layerparity.ports._observe import ObservedStage
from layerparity.ports.base import Call, Observed
from layerparity.ports.hf import HfPort

if TYPE_CHECKING:
    from torch import nn

SCORES = "mlp.gate:scores"
# What accelerate leaves on a module whose weights wait elsewhere.
_HOOKS = ("_hf_hook", "_old_forward", "forward")


class Evaluator(HfPort):
    """One way of computing what a port has loaded, with masks and a cache of its own.

    In the port's own floating type or a wider one the port's own modules run; for a narrower
    ``dtype`` a stage is copied into it until it is forgotten.
    """

    def __init__(self, port: HfPort, way: Way, dtype: torch.dtype | None = None) -> None:
        self.__dict__.update(port.__dict__)
        self.way = way
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
            module = self._copy(stage, module)
        self._stages[stage] = _plain(self._observed(stage, module))
        return {}

    def release(self, stage: str) -> None:
        """Forget the stage; its weights are the port's."""
        self._stages.pop(stage, None)

    def evaluate(self, stage: str, given: torch.Tensor, choices: torch.Tensor | None) -> Observed:
        """Run a stage with another run's routing, ``choices`` int64 [batch, token, k].

        The scores that the router chose from are observed as well, at `SCORES`.
        """
        flat = None if choices is None else choices.flatten(0, 1)
        told = Replay(flat, expert_count(self.skeleton.config))
        given = given.to(self.dtype) if given.is_floating_point() else given
        if self.way.perturbs:
            given = perturbed(given, sum(stage.encode()))
        with self.way.around(self.skeleton.config), told:
            observed = self.run(stage, given)
        if told.scores is not None and self._call is not None:
            scores = told.scores.detach().cpu()
            observed.tensors[SCORES] = scores.reshape(self._call.batch, self._call.tokens, -1)
            observed.specs[SCORES] = EXPERTS
        return observed

    def _copy(self, stage: str, module: nn.Module) -> nn.Module:
        """Return a copy in the narrow type; what the family keeps in float32 stays so.

        Offloaded weights are fetched, once. Raises UserError where the copy does not fit.
        """
        try:
            twin = _without_hooks(module).to(self._narrow)
            for path, part in module.named_modules():
                _fetch(part, twin.get_submodule(path), self._narrow)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{stage} and its copy in {self._narrow} do not fit: make the golden with "
                f"reference.dtypes=[{str(self.skeleton.dtype).removeprefix('torch.')}]."
            ) from error
        kept = self.skeleton.float32_patterns
        for name, tensor in module.state_dict().items():
            if any(fnmatchcase(f".{name}", pattern) for pattern in kept):
                owner, _, leaf = name.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, tensor)
        return twin


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy that accelerate does not look after; offloaded weights stay on meta."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    # A hook may hold all weights: the copy gets none of its own.
    twin = copy.deepcopy(module, {id(hook): hook for hook in hooks if hook is not None})
    for part in twin.modules():
        if "_hf_hook" in part.__dict__:
            for name in _HOOKS:
                part.__dict__.pop(name, None)
    return twin


def _fetch(part: nn.Module, twin: nn.Module, dtype: torch.dtype | None) -> None:
    """Give a module's copy the weights that accelerate keeps elsewhere, where they run."""
    hook: Any = getattr(part, "_hf_hook", None)
    device = next(
        (d for h in getattr(hook, "hooks", (hook,)) if (d := getattr(h, "execution_device", None))),
        None,
    )
    for name, value in part.named_parameters(recurse=False):
        held = offloaded(part, name) if value.is_meta else None
        if held is not None:
            own = torch.nn.Parameter(held.to(device, dtype), requires_grad=False)
            setattr(twin, name, own)


def _plain(module: ObservedStage) -> Callable[..., Any]:
    # A module would be compiled by the backend; what sets the scale is computed as it is written.
    return module.__call__
