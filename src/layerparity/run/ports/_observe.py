"""Make a stage of a transformers model a function that returns (output, {site: tensor})."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import ROUTED, Tap
from layerparity.model.arguments import CACHE_NAMES
from layerparity.numbers.arithmetic import Replay
from layerparity.run.ports._canonical import REPLAYED, own_choices


class ObservedStage(nn.Module):
    """A stage's module whose forward also returns what its taps saw.

    As a plain function of tensors it can be run eagerly, traced or exported: the observed tensors
    are outputs, which is all that a compiled graph can show.
    """

    def __init__(
        self,
        module: nn.Module,
        taps: list[tuple[str, Tap]],
        after: Callable[[torch.Tensor], torch.Tensor] | None = None,
        experts: int = 0,
        choosers: Mapping[str, str] | None = None,
    ) -> None:
        """``taps`` pairs each tap with its module path inside ``module``.

        ``after`` is what the model computes of the module's output before the next stage;
        ``experts`` the number that its router chooses from. ``choosers`` are the paths of modules
        that choose tokens, by the site that shows which.
        """
        super().__init__()
        self.module = module
        self.taps = taps
        self.after = after
        self.experts = experts
        self.choosers = dict(choosers or {})

    def forward(
        self, given: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the stage's output and the tensors at its taps, by local site address.

        ``given`` and the output are floating [batch, token, channel], ids int64 [batch, token] at
        the embedding; what taps saw is as the module gave it. Among the arguments, `REPLAYED` tells
        what to choose, int64 [batch, token, k] by site; what would have been chosen is seen at
        `own_choices` of the site, int64 [batch * token, k], or [batch, token, k] of tokens.
        """
        seen: dict[str, torch.Tensor] = {}
        arguments = dict(arguments)
        told: dict[str, torch.Tensor] = arguments.pop(REPLAYED, {})
        if "past_key_values" in arguments:
            # A module may have another name for the cache.
            taken = inspect.signature(self.module.forward).parameters
            own = next((name for name in CACHE_NAMES if name in taken), "past_key_values")
            arguments[own] = arguments.pop("past_key_values")
        with ExitStack() as stack:
            for path, tap in self.taps:
                stack.enter_context(_watch(self.module.get_submodule(path), tap, seen))
            replays = self._replays(told, stack)
            output = first_tensor(self.module(given, **arguments))
        for local, replay in replays.items():
            if replay.scores is not None:
                seen[own_choices(local)] = replay.scores.topk(replay.k, dim=-1).indices
        return output if self.after is None else self.after(output), seen

    def _replays(self, told: Mapping[str, torch.Tensor], stack: ExitStack) -> dict[str, Replay]:
        """Let the stage choose what it is told to while ``stack`` is open."""
        replays: dict[str, Replay] = {}
        if ROUTED in told:
            routed = Replay(told[ROUTED].flatten(0, 1), self.experts)
            replays[ROUTED] = stack.enter_context(routed)
        for local, path in self.choosers.items():
            if local in told:
                replays[local] = own = Replay(told[local], None)
                stack.enter_context(own.inside(self.module.get_submodule(path)))
        return replays


def first_tensor(output: Any) -> torch.Tensor:
    """Return a module's output, of any shape and dtype, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _watch(module: nn.Module, tap: Tap, seen: dict[str, torch.Tensor]) -> Iterator[None]:
    if tap.attention is not None:

        def passing(name: str, value: Any) -> Any:
            if name == tap.attention:
                _note(seen, tap, value)
            return value

        with attention_interface(module, passing):
            yield
        return
    if tap.of_input:
        # The first argument, however it was passed.
        handle = module.register_forward_pre_hook(
            lambda _, args, named: _note(seen, tap, next(iter((*args, *named.values())), None)),
            with_kwargs=True,
        )
    else:
        handle = module.register_forward_hook(lambda _, __, output: _note(seen, tap, output))
    try:
        yield
    finally:
        handle.remove()


def _note(seen: dict[str, torch.Tensor], tap: Tap, value: Any) -> None:
    # Returns nothing on purpose: a hook that returns a value replaces the module's output.
    if isinstance(value, tuple):
        picked = tap.pick if tap.pick is not None else 0
        if picked >= len(value):
            return
        value = value[picked]
    elif tap.pick:
        return
    if isinstance(value, torch.Tensor):
        # A copy: what follows may write into the tensor, or hand it on as its own output.
        seen[tap.local] = value.clone()


@contextmanager
def attention_interface(module: nn.Module, passing: Callable[[str, Any], Any]) -> Iterator[None]:
    """Wrap transformers' attention look-up, where rotated queries and keys of a module pass by.

    ``passing`` is called with ``query`` or ``key`` and the value, floating [batch, head, token,
    channel], or ``context`` and [batch, token, head, channel]; it returns what goes on in its
    place.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    look_up = INTERFACE.get_interface

    def wrapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        attend = look_up(*args, **kwargs)

        def observed(owner: nn.Module, query: Any, key: Any, *rest: Any, **named: Any) -> Any:
            if owner is not module:
                return attend(owner, query, key, *rest, **named)
            query, key = passing("query", query), passing("key", key)
            result = attend(owner, query, key, *rest, **named)
            if isinstance(result, tuple):
                return (passing("context", result[0]), *result[1:])
            return passing("context", result)

        return observed

    INTERFACE.get_interface = wrapped
    try:
        yield
    finally:
        INTERFACE.get_interface = look_up


@contextmanager
def attention_by_query() -> Iterator[None]:
    """Let transformers' attention answer one token's queries at a time, as in a decode step.

    Its kernels have another order of sums for a single query than for several.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    look_up = INTERFACE.get_interface

    def wrapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        attend = look_up(*args, **kwargs)

        def by_query(
            owner: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            *rest: Any,
            **named: Any,
        ) -> tuple[torch.Tensor, None]:
            queries = query.split(1, 2)
            masks = [None] * len(queries) if attention_mask is None else attention_mask.split(1, -2)
            results = [
                first_tensor(attend(owner, q, key, value, mask, *rest, **named))
                for q, mask in zip(queries, masks, strict=True)
            ]
            return torch.cat(results, 1), None

        return by_query

    INTERFACE.get_interface = wrapped
    try:
        yield
    finally:
        INTERFACE.get_interface = look_up
