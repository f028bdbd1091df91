"""Make a stage of a transformers model a function that returns (output, {site: tensor})."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import ROUTED, Tap
from layerparity.model.arguments import CACHE_NAMES
from layerparity.numbers.arithmetic import Replay
from layerparity.numbers.rows_apart import cut
from layerparity.ports.observed.canonical import FED, KEPT, REPLAYED, kept_rows, own_choices
from layerparity.ports.observed.fed import Fed, called_again
from layerparity.ports.observed.handed import HANDED, Handing

# What is told a value at a tap, of any shape, and returns what goes on.
Meet = Callable[[Tap, torch.Tensor], torch.Tensor]
# Queries that eager attention answers at a time; each has a score for every key, in every head.
BLOCK = 1024
# Queries some at a time, with the mask of each; None: all of them at once.
_Pieces = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]] | None


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
        `own_choices` of the site, int64 [batch * token, k], or [batch, token, k] of tokens. `FED`
        is what goes on in place of what taps see, `HANDED` what other stages handed on, `KEPT`
        which tokens of a prefill are shown.
        """
        arguments = dict(arguments)
        handing = Handing(self.module, arguments.pop(HANDED, {}))
        told: dict[str, torch.Tensor] = arguments.pop(REPLAYED, {})
        leading = {local for _, tap in self.taps for local in tap.follows}
        fed = arguments.pop(FED, None)
        noted = _Seen(None if fed is None else Fed(*fed), leading, arguments.pop(KEPT, None))
        if "past_key_values" in arguments:
            # A module may have another name for the cache.
            taken = inspect.signature(self.module.forward).parameters
            own = next((name for name in CACHE_NAMES if name in taken), "past_key_values")
            arguments[own] = arguments.pop("past_key_values")
        with ExitStack() as stack:
            for path, tap in self.taps:
                module = self.module.get_submodule(path)
                if noted.fed is not None and tap.local in leading:
                    stack.enter_context(noted.lead(module, tap))
                stack.enter_context(watched(module, tap, noted.meet))
            replays = self._replays(told, stack)
            returned = self.module(given, **arguments, **handing.arguments)
            output = first_tensor(returned)
        for local, replay in replays.items():
            if replay.scores is not None:
                chosen = replay.scores.topk(replay.k, dim=-1).indices
                noted.tensors[own_choices(local)] = chosen
        noted.tensors |= handing.handed_on(returned)
        return output if self.after is None else self.after(output), noted.tensors

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
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


@dataclass
class _Seen:
    """What taps saw in one pass, by local site; what they were ``fed`` goes on in its place.

    ``leading`` are the taps whose value others of the same call of their module are made from.
    Of the ``kept`` tokens alone, where not all are: their columns, int64, of sequences and tokens.
    """

    fed: Fed | None
    leading: set[str]
    kept: tuple[torch.Tensor, int, int] | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def meet(self, tap: Tap, value: torch.Tensor) -> torch.Tensor:
        """Note a value as the module gave it; return what goes on."""
        # A copy: what follows may write into the tensor, or hand it on as its own output.
        copied = value.clone() if self.kept is None else kept_rows(tap, value, *self.kept)
        self.tensors[tap.local] = copied
        return value if self.fed is None else self.fed.instead_of(tap, value)

    def lead(self, module: nn.Module, tap: Tap) -> AbstractContextManager[None]:
        """Let what a module makes of its own value be made of the one it is fed."""

        def hook(_: nn.Module, args: Any, named: Any, output: Any) -> Any:
            assert self.fed is not None
            value = picked(tap, output)
            if value is None:
                return None
            instead = self.fed.instead_of(tap, value)
            if instead is value:
                return None
            again = called_again(module, (args, named), value, instead)
            # The tap itself comes next, and shows what was computed.
            return None if again is None else put(tap, again, value)

        return _removed(module.register_forward_hook(hook, with_kwargs=True))


@contextmanager
def watched(module: nn.Module, tap: Tap, meet: Meet) -> Iterator[None]:
    """Let a tap's value pass by ``meet``, whose answer goes on in its place.

    An answer that is the value itself leaves all as it is.
    """
    if tap.attention is not None:
        with attention_interface(
            module, lambda name, value: meet(tap, value) if name == tap.attention else value
        ):
            yield
        return

    def at_output(owner: nn.Module, _: Any, output: Any) -> Any:
        derived = tap.derived
        value = picked(tap, output) if derived is None else derived.read(owner, output)
        if value is None:
            return None
        answer = meet(tap, value)
        # A hook that returns a value replaces the module's output.
        if answer is value:
            return None
        if derived is None:
            return put(tap, output, answer)
        return None if derived.write is None else derived.write(owner, output, answer)

    if tap.of_input:
        handle = module.register_forward_pre_hook(_at_input(tap, meet), with_kwargs=True)
    else:
        handle = module.register_forward_hook(at_output)
    with _removed(handle):
        yield


def _at_input(tap: Tap, meet: Meet) -> Callable[..., object]:
    """Return the hook that lets what a module is given pass by."""

    def at_input(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if tap.argument:
            value = named.get(tap.argument)
            answer = None if value is None else meet(tap, value)
            return None if answer is value else (args, {**named, tap.argument: answer})
        # By its place among the arguments, however they were passed.
        given, place = [*args, *named.values()], tap.pick or 0
        value = given[place] if place < len(given) else None
        if not isinstance(value, torch.Tensor):
            return None
        answer = meet(tap, value)
        if answer is value:
            return None
        given[place] = answer
        return tuple(given[: len(args)]), dict(zip(named, given[len(args) :], strict=True))

    return at_input


def picked(tap: Tap, output: Any) -> torch.Tensor | None:
    """Return the tensor of a module's output that a tap shows, or None."""
    if isinstance(output, tuple):
        place = tap.pick or 0
        output = output[place] if place < len(output) else None
    elif tap.pick:
        return None
    return output if isinstance(output, torch.Tensor) else None


def put(tap: Tap, output: Any, value: torch.Tensor) -> Any:
    """Return a module's output with another tensor where the tap shows one."""
    if not isinstance(output, tuple):
        return value
    place = tap.pick or 0
    return (*output[:place], value, *output[place + 1 :])


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


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

    def cut_apart(queries: torch.Tensor, mask: torch.Tensor | None, _: str) -> _Pieces:
        pieces = cut(queries, 2)
        return pieces, [None] * len(pieces) if mask is None else cut(mask, -2)

    with _attention_of(cut_apart):
        yield


@contextmanager
def attention_in_blocks() -> Iterator[None]:
    """Let eager attention answer so many queries at a time that scores are as many as of one block.

    Up to one block all is as ever. Without a mask a kernel counts the queries itself.
    """

    def split(queries: torch.Tensor, mask: torch.Tensor | None, kernel: str) -> _Pieces:
        count = queries.shape[2]
        if kernel != "eager" or count <= BLOCK or mask is None or mask.shape[-2] != count:
            return None
        rows = max(1, BLOCK * BLOCK // mask.shape[-1])
        return queries.split(rows, 2), mask.split(rows, -2)

    with _attention_of(split):
        yield


@contextmanager
def _attention_of(
    pieces: Callable[[torch.Tensor, torch.Tensor | None, str], _Pieces],
) -> Iterator[None]:
    """Let transformers' attention answer queries [batch, head, token, channel] in pieces.

    ``pieces`` returns them with their masks, of the queries, their mask and the name of the
    attention; or None, and they are answered as they are.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    look_up = INTERFACE.get_interface

    def wrapped(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        attend = look_up(name, *args, **kwargs)

        def in_pieces(
            owner: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            *rest: Any,
            **named: Any,
        ) -> Any:
            found = pieces(query, attention_mask, name)
            if found is None:
                return attend(owner, query, key, value, attention_mask, *rest, **named)
            results = [
                first_tensor(attend(owner, q, key, value, mask, *rest, **named))
                for q, mask in zip(*found, strict=True)
            ]
            return torch.cat(results, 1), None

        return in_pieces

    INTERFACE.get_interface = wrapped
    try:
        yield
    finally:
        INTERFACE.get_interface = look_up
