"""Compute a port's loaded stages once more, in another clean way."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from layerparity.anatomy.family import CHOSEN_TOKENS
from layerparity.anatomy.site import Place, Site
from layerparity.ground.errors import UserError
from layerparity.making.beside import Beside
from layerparity.model.activations import of_stage
from layerparity.model.prints import offloaded
from layerparity.model.weight_types import stays_float32
from layerparity.numbers.arithmetic import Replay
from layerparity.numbers.clean import Way, perturbed
from layerparity.numbers.operands import ACTIVATIONS
from layerparity.ports.base import Call, Observed
from layerparity.ports.known.hf import HfPort
from layerparity.ports.observed.canonical import CHOICES, visible
from layerparity.ports.observed.observe import (
    BLOCK,
    ObservedStage,
    attention_by_query,
    attention_in_blocks,
)

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.skeleton import Skeleton
    from layerparity.numbers.activations import Activations


def scores_at(choices: str) -> str:
    """Return where the scores are shown that choices were made from."""
    return f"{choices.partition(':')[0]}:scores"


SCORES = scores_at(CHOICES)
# Where those of groups of experts are shown, of routers that choose among these first.
GROUP_SCORES = f"{CHOICES.partition(':')[0]}:group_scores"
# What accelerate leaves on a module whose weights wait elsewhere.
_HOOKED = ("_hf_hook", "_old_forward", "forward")


class OtherWeights(Protocol):
    """Weights of the same modules that a way computes with in place of the port's own."""

    @property
    def copied(self) -> StageCopy:
        """Where the copy of a stage with these weights is kept."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Where they are stored."""

    @property
    def skeleton(self) -> Skeleton:
        """What knows the stored names of each."""

    def loaded(self, stage: str) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Yield a stage's tensors by their place in its module."""


class StageCopy:
    """The copy of a loaded stage in another floating type: the last one that was made.

    Ways of one type in turn share it. Two at a time would take the memory of two.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._dtype: torch.dtype | None = None
        self._module: nn.Module | None = None

    def find(self, stage: str, dtype: torch.dtype) -> nn.Module | None:
        """Return the copy of a stage, or of a component of what was copied; None for another."""
        place, kept = Place.parse(stage), self._stage
        if self._module is None or dtype != self._dtype or kept not in (stage, place.stage):
            return None
        return self._module if kept == stage else self._module.get_submodule(place.module)

    def keep(self, stage: str, dtype: torch.dtype, module: nn.Module) -> None:
        """Keep a copy in place of the one before."""
        self._stage, self._dtype, self._module = stage, dtype, module

    def forget(self) -> None:
        """Keep none: the stage's weights may go."""
        self._module = None


class Evaluator(HfPort):
    """One way of computing what a port has loaded, with masks and a cache of its own.

    In the port's own floating type or a wider one the port's own modules run; for a narrower
    ``dtype`` a stage is copied into it, and so is one that is offloaded; ``copied`` is where the
    evaluators of a port share such a copy, until it is forgotten. So it is with ``weights`` that
    are not the port's.
    """

    def __init__(
        self,
        port: HfPort,
        way: Way,
        dtype: torch.dtype | None = None,
        copied: StageCopy | None = None,
        weights: OtherWeights | None = None,
    ) -> None:
        # A user's own port holds its methods again, checked and bound to it: not this way's.
        held = port.__dict__.items()
        self.__dict__.update((k, v) for k, v in held if not hasattr(HfPort, k) or not callable(v))
        self._copied = weights.copied if weights else copied or StageCopy()
        self._weights = weights
        self.way = way
        self._narrow = dtype if dtype not in (None, port.skeleton.dtype) else None
        self._stages, self._taps, self._sent = {}, {}, {}
        self._modules: dict[str, nn.Module] = {}
        self._inputs: dict[str, dict[int, Activations]] = {}
        self._beside: dict[str, Beside] = {}
        self._arguments, self._call = [], None
        self._attended: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The floating type the way computes in."""
        return self.way.wide or self._narrow or self.skeleton.dtype

    def begin(self, call: Call) -> None:
        """Prepare a pass as this way's implementations and type want it, after the port did."""
        self._attended = None
        with self.way.around(self.skeleton.config):
            super().begin(call)

    def _passed(self, call: Call) -> list[dict[str, Any]]:
        """Return the blocks' arguments; of a long prompt none: each way has its own masks."""
        return [] if _is_long(call) else super()._passed(call)

    def _arguments_of(self, stage: str) -> dict[str, Any]:
        site = Site(stage, "in")
        attends = site.layer is not None and site.component in ("", "self_attn")
        if attends and not self._arguments and self._call is not None:
            self._arguments = super()._passed(self._call)
        return super()._arguments_of(stage)

    def load(self, stage: str) -> dict[str, str]:
        """Take the stage as it is loaded; nothing is read."""
        module = self.skeleton.module(stage)
        waits = any(value.is_meta for value in module.parameters())
        if self._narrow is not None or waits or self._weights:
            # accelerate would make the copies it fetches in whatever type this way computes in.
            dtype = self._narrow or self.skeleton.dtype
            found = self._copied.find(stage, dtype)
            if found is None:
                self._copied.forget()
                found = self._copy(stage, module, dtype)
                self._copied.keep(stage, dtype, found)
            module = found
        # A module would be compiled by the backend; what sets the scale is computed as it is
        # written.
        self._stages[stage] = partial(self._computed, stage, self._observed(stage, module))
        self._modules[stage] = module
        if self.way.operands == ACTIVATIONS:
            of = self._weights or self
            checkpoint = self._weights.checkpoint if self._weights else self.assets.checkpoint
            self._inputs[stage] = of_stage(of.skeleton, checkpoint, stage, module)
        return {}

    def _computed(
        self, stage: str, observed: ObservedStage, given: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a stage's output and what its taps saw of its own input."""
        output, seen = observed(given, arguments)
        self._beside[stage].take_out(self._taps[stage], seen)
        return output, seen

    def release(self, stage: str) -> None:
        """Forget the stage; its weights are the port's."""
        self._beside.pop(stage, None)
        self._stages.pop(stage, None)
        self._modules.pop(stage, None)
        self._inputs.pop(stage, None)
        if self._call is not None and _is_long(self._call):
            self._arguments = []
            self._sent.clear()

    def evaluate(
        self,
        stage: str,
        given: torch.Tensor,
        choices: Mapping[str, torch.Tensor],
        steps: bool = False,
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Observed]:
        """Run a stage with another run's ``choices``, int64 [batch, token, k], by their site.

        ``given`` is [batch, token, channel] of any floating type. The scores that a router chose
        from are observed as well, floating [batch, token, expert], beside its choices, at `SCORES`,
        0 where it could not choose; so are those of groups of experts, at `GROUP_SCORES`;
        those that attention chose from, [batch, token, token so far], are 0 where it may not look.
        With ``steps`` each token is a decode step, and rounds as it would alone. ``beside`` is what
        components of the block are given in the same call, like ``given`` and by their own stage.
        Returns what was observed by stage; it lacks a component that could not be called so.
        """
        told, module = choices.get(CHOICES), self._modules[stage]
        experts = self.skeleton.sizes.experts
        router = Replay(None if told is None else told.flatten(0, 1), experts)
        parts = {Place.parse(part).module: part for part in beside or {}}
        others = self._beside[stage] = Beside(
            {path: self._given(part, (beside or {})[part]) for path, part in parts.items()}
        )
        attending = {}
        with ExitStack() as stack:
            inputs = self._inputs.get(stage)
            stack.enter_context(self.way.around(self.skeleton.config, steps, inputs))
            stack.enter_context(attention_by_query() if steps else attention_in_blocks())
            stack.enter_context(router)
            for path, tap in self._taps[stage]:
                if tap.chooses_tokens:
                    attending[tap.local] = own = Replay(choices.get(tap.local), None)
                    stack.enter_context(own.inside(module.get_submodule(path)))
            stack.enter_context(others.inside(module))
            observed = {stage: self.run(stage, self._given(stage, given, steps))}
        for path, output in others.outputs.items():
            part = parts[path]
            self._taps[part] = self._taps_of(part, self.assets.wanted)
            seen = self.assets.backend.fetch(others.seen)
            observed[part] = self._canonical(part, output, seen)
        self._show_scores(router, list(observed.values()))
        visibly = visible(self.begun)
        for own in attending.values():
            scores = None if own.scores is None else own.scores.detach().cpu()
            scores = None if scores is None else scores[..., : visibly.shape[-1]]
            self._attended = (
                None if scores is None else self.begun.kept.of(scores.masked_fill(~visibly, 0.0))
            )
        if self._attended is not None:
            # A block that takes what another chose takes it by that one's scores.
            chosen = [n for n, spec in observed[stage].specs.items() if spec is CHOSEN_TOKENS]
            observed[stage].tensors |= dict.fromkeys(map(scores_at, chosen), self._attended)
        return observed

    def take_handed(self, other: Evaluator) -> None:
        """Take what stages of another way handed on by now for what this one's did."""
        self.begun.handed |= other.begun.handed
        self._attended = other._attended

    def _given(self, stage: str, given: torch.Tensor, steps: bool = False) -> torch.Tensor:
        """Return what a stage is given, in this way's type, and disturbed if it does that."""
        if not given.is_floating_point():
            return given
        given = given.to(self.dtype)
        if not self.way.perturbs:
            return given
        passes = given.split(1, 1) if steps else (given,)
        return torch.cat([perturbed(each, sum(stage.encode())) for each in passes], 1)

    def _show_scores(self, router: Replay, observed: Sequence[Observed]) -> None:
        """Note the scores that a router chose from, of each input that it was given in one call."""
        call = self.begun
        rows = call.batch * call.tokens
        for local, shown in ((SCORES, router.scores), (GROUP_SCORES, router.groups)):
            if shown is None or router.scores is None:
                continue
            scores = shown.detach().cpu().flatten(0, -2)
            scores = scores.masked_fill(scores.isneginf(), 0.0)
            routed = [each for each in observed if CHOICES in each.tensors]
            for each, own in zip(routed or observed[:1], scores.split(rows), strict=False):
                each.tensors[local] = call.kept.of(own.reshape(call.batch, call.tokens, -1))

    def fed(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what goes on at a stage's sites, in this way's type, and disturbed if it does."""
        fed = {local: value.to(self.dtype) for local, value in super().fed(stage).items()}
        if not self.way.perturbs:
            return fed
        # What a fused kernel goes on with was never rounded as it was recorded.
        return {n: perturbed(v, sum(f"{stage} {n}".encode())) for n, v in fed.items()}

    def _copy(self, stage: str, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return a copy in another stored type; what the family keeps in float32 stays so.

        Offloaded weights are fetched to where they run. Raises UserError where they do not fit.
        """
        patterns = self.skeleton.float32_patterns
        twin = _sharing(module)
        others = self._weights.loaded(stage) if self._weights else nullcontext({})
        try:
            with others as given:
                for path, part, name, value in _tensors(module):
                    place = f"{path}.{name}" if path else name
                    kept = stays_float32(place, patterns)
                    wanted = dtype if value.is_floating_point() and not kept else value.dtype
                    fresh = given.get(place, value).to(_runs_on(part, value), wanted)
                    owner = twin.get_submodule(path)
                    if name in owner._parameters:
                        fresh = torch.nn.Parameter(fresh, requires_grad=False)
                    setattr(owner, name, fresh)
        except torch.OutOfMemoryError as error:
            own = str(self.skeleton.dtype).removeprefix("torch.")
            raise UserError(
                f"{stage} does not fit a second time, for its noise floor in {dtype}: use "
                f"reference.dtypes=[{own}], or reference.make=false."
            ) from error
        return twin


def _is_long(call: Call) -> bool:
    """Say whether masks by the square of a pass's tokens are too large to be kept for each way."""
    return call.batch * call.tokens**2 > BLOCK**2


def _sharing(module: nn.Module) -> nn.Module:
    """Return a copy with the same tensors, which accelerate does not look after.

    It shares the configuration: a way names its implementations there.
    """
    parts = list(module.modules())
    configs = (part.__dict__.get("config") for part in parts)
    shared = (*module.parameters(), *module.buffers(), *map(_hook, parts), *configs)
    twin = copy.deepcopy(module, {id(each): each for each in shared if each is not None})
    for part in twin.modules():
        if _hook(part) is not None:
            for name in _HOOKED:
                part.__dict__.pop(name, None)
    return twin


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield a module's tensors with the path of their owner, the owner and their name in it."""
    for path, part in module.named_modules():
        named = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, value in named:
            real = offloaded(part, name) if value.is_meta else value
            if real is not None:
                yield path, part, name, real


def _runs_on(part: nn.Module, value: torch.Tensor) -> Any:
    """Return the device that a module runs on: accelerate's, or that of its ``value``."""
    hook = _hook(part)
    devices = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
    return next((device for device in devices if device is not None), value.device)


def _hook(part: nn.Module) -> Any:
    return getattr(part, "_hf_hook", None)
