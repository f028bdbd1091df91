"""Contexts that change how torch computes: the order of sums, type, routing, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

Operation = Callable[..., Any]
# Of an input [..., channel] and a weight [row, channel], both floating: [..., row].
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Elements of a weight that are laid out anew at a time, and what its rows are then a multiple of:
# fewer would be multiplied by another kernel, in another order.
_PART, _ROWS = 1 << 22, 64
# Tokens from which on a product does not depend on how its weight is laid out.
_MANY = 8
# Below this product of terms and rows torch multiplies batches by a loop of its own, which adds
# otherwise. With zeros up to there it adds as a single product does, if so few terms are added.
_FEWEST, _SHORT = 400, 8
_HIGHEST: Set[Operation] = frozenset({torch.max, torch.Tensor.max})
_TOP: Set[Operation] = frozenset({torch.topk, torch.Tensor.topk})
# Their names hold the type: there is no argument that `Widen` could replace by the wide one.
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double)


class Mode(TorchFunctionMode):
    """A context in which ``run(func, args, named)`` answers each torch operation.

    With ``answers``, only these; most operations pass through several contexts, and through each
    thousands of times.
    """

    answers: Set[Operation] | None = None

    def __torch_function__(
        self,
        func: Operation,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Hand an operation to ``run``, or let it pass."""
        named = kwargs or {}
        if self.answers is not None and func not in self.answers:
            return func(*args, **named)
        return self.run(func, args, named)

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return an operation's result; as it is, unless a mode knows better."""
        return func(*args, **named)


class Linear(Mode):
    """Replace every ``linear(input, weight)`` by ``product``; the bias is added afterwards."""

    answers: Set[Operation] | None = frozenset({linear})

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run a linear layer by the product."""
        return self._replaced(*args, **named)

    def _replaced(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        # A product may be a sum of several: each of them would add the bias once more.
        result = self.product(input, weight)
        return result if bias is None else result + bias


def sharded(shards: int) -> Product:
    """Return a product of partial sums, each rounded, as tensor parallelism adds them."""

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(input.chunk(shards, -1), weight.chunk(shards, -1), strict=True)
        return _added(linear(left, right) for left, right in parts)

    return product


def strided(shards: int, by_row: bool = False) -> Product:
    """Return a product of partial sums over every ``shards``-th term, each rounded.

    ``by_row`` gives what each row of the input gives alone, inside `Apart`.
    """

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        count = min(shards, input.shape[-1])
        # Shards of two lengths fit into no one tensor: each is cut out and multiplied alone.
        if input.shape[-1] % count:
            return _added(
                linear(input[..., start::count], weight[..., start::count])
                for start in range(count)
            )
        tokens = input.reshape(-1, input.shape[-1])
        terms = tokens.unflatten(-1, (-1, count)).permute(2, 0, 1).contiguous()
        # Which kernel is called must not depend on the others, where each row is by itself.
        rows = 1 if by_row else len(tokens)
        large = rows >= _MANY and weight.numel() >= _PART and weight.device.type == "cpu"
        if large:
            sums = [_added(_shuffled(terms, part)) for part in _parts(weight)]
        else:
            sums = [_added(_transposed(terms, part, rows)) for part in _parts(weight)]
        return torch.cat(sums, -1).view(*input.shape[:-1], -1)

    return product


def _parts(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return some rows at a time of a weight [row, channel]."""
    rows: Sequence[torch.Tensor] = weight.split(max(1, _PART // weight.shape[-1] // _ROWS) * _ROWS)
    return rows


def _shuffled(terms: torch.Tensor, weight: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the product [token, row] of each of ``terms`` [shard, token, term] and its weights.

    ``weight`` is [row, channel]. A shard alone would read all of it for one term in so many: torch
    knows the order of all as a shuffle of channels, for which it has fast code.
    """
    count, _, size = terms.shape
    channels = weight.reshape(len(weight), -1, 1, 1).to(memory_format=torch.channels_last)
    shards = torch.native_channel_shuffle(channels, size).reshape(-1, count, size)
    return map(linear, terms, shards.unbind(1))


def _transposed(terms: torch.Tensor, weight: torch.Tensor, tokens: int) -> Iterable[torch.Tensor]:
    """Return what `_shuffled` does, of a weight that is small, or of few ``tokens`` at a time."""
    (count, _, size), rows = terms.shape, len(weight)
    shards = weight.t().contiguous().view(size, count, rows).transpose(0, 1)
    short = size * rows < _FEWEST
    # A batch holds all partial sums at once: where they are large, they are made one at a time.
    if rows == 1 or (size >= _SHORT if short else count * tokens * rows > _PART):
        return map(torch.mm, terms, shards)
    if short:
        shards = functional.pad(shards, (0, -(-_FEWEST // size) - rows))
    return torch.bmm(terms, shards)[..., :rows].unbind()


def pairwise(shards: int) -> Product:
    """Return a product of partial sums that are added two by two, as a reduction tree does."""

    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(input.chunk(shards, -1), weight.chunk(shards, -1), strict=True)
        sums = [linear(left, right) for left, right in parts]
        while len(sums) > 1:
            odd = sums[-1:] if len(sums) % 2 else []
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
        return sums[0]

    return product


def shuffled(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [..., row] of [..., channel] and [row, channel], terms in a fixed random order."""
    # Drawn on the CPU for every device: another device's generator draws another order.
    order = torch.randperm(input.shape[-1], generator=torch.Generator().manual_seed(0))
    order = order.to(input.device)
    return linear(input[..., order], weight[..., order])


def backwards(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [..., row] of [..., channel] and [row, channel], terms in the opposite order."""
    return linear(input.flip(-1), weight.flip(-1))


def accumulated(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [..., row] of [..., channel] and [row, channel], summed in float64, rounded once."""
    return linear(input.double(), weight.double()).to(input.dtype)


def _added(partials: Iterable[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    # In place, since a partial sum is a new tensor that nobody else holds.
    for partial in partials:
        total = partial if total is None else total.add_(partial)
    assert total is not None
    return total


class Widen(Mode):
    """Compute in ``dtype``: operations that meet a tensor of it take their others in it as well.

    The weights stay as they are stored: each is widened where an operation meets it, so no second
    copy of a stage is ever held. Casts that a model's code makes by name (a norm's
    ``.to(float32)``, a softmax's ``dtype=float32``) are widened too: a reference one precision
    wider has none left.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._room = torch.empty(0, dtype=dtype)

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run one operation, its floating dtypes and narrower operands made wide."""
        if func in _CASTS:
            return args[0].to(self.dtype)
        if func is functional.embedding:
            # Nothing that it is given is wide: what follows would not be either.
            return func(*args, **named).to(self.dtype)
        # A weight is the largest operand there is: it is widened some rows at a time.
        if func is linear and len(args) > 1 and args[0].dtype == self.dtype:
            return self._linear(*args, **named)
        args = [self._dtypes(each) for each in args]
        named = {key: self._dtypes(value) for key, value in named.items()}
        if self._meets(args) or self._meets(named.values()):
            args = [self._wide(each) for each in args]
            named = {key: self._wide(value) for key, value in named.items()}
        return func(*args, **named)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply [..., channel] by [row, channel], of which some rows are widened at a time.

        They take the memory of those before: fresh memory, which the system clears first, took
        longer than the product.
        """
        bias = None if bias is None else bias.to(self.dtype)
        if weight.dtype == self.dtype:
            return linear(input, weight, bias)
        parts = _parts(weight)
        if self._room.numel() < parts[0].numel() or self._room.device != weight.device:
            self._room = torch.empty(parts[0].numel(), dtype=self.dtype, device=weight.device)
        biases = [None] * len(parts) if bias is None else bias.split(len(parts[0]))
        products = [
            linear(input, self._room[: part.numel()].view(part.shape).copy_(part), own)
            for part, own in zip(parts, biases, strict=True)
        ]
        return torch.cat(products, -1) if len(parts) > 1 else products[0]

    def _dtypes(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return self.dtype
        return value

    def _meets(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.dtype == self.dtype:
                    return True
            elif isinstance(value, (list, tuple)) and self._meets(value):
                return True
        return False

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            narrow = value.is_floating_point() and value.dtype != self.dtype
            return value.to(self.dtype) if narrow else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._wide(each) for each in value)
        return value


class Replay(Mode):
    """Answer a router's top-k with another run's choices, so that only arithmetic is left.

    The router's own scores still weigh the experts. ``choices`` is int64 [token, k], or None to
    only listen; a top-k of another size, or over another number of scores than ``experts``, is
    somebody else's. One maximum after the other is answered too, by the highest of the choices
    first. ``scores`` is floating [token, expert], what the router would have chosen ``k``
    from; None until it ran. ``groups``, floating [token, group], are the scores of groups of
    experts where the router chose among these before.

    Without a number of ``experts``, attention chooses among tokens: any top-k while a module runs
    that is `inside` it. A choice of -1, or one of fewer than ``k``, is none: the last one of the
    same token stands in its place, and attention sees that once.
    """

    answers: Set[Operation] | None = _HIGHEST | _TOP

    def __init__(self, choices: torch.Tensor | None, experts: int | None) -> None:
        super().__init__()
        self.choices, self.experts = choices, experts
        self.scores: torch.Tensor | None = None
        self.groups: torch.Tensor | None = None
        self.k = 0
        self._inside = self._is_top_k = False

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Answer what a module asks, and what no other does."""
        handles = (
            module.register_forward_pre_hook(lambda *_: self._enter(True)),
            module.register_forward_hook(lambda *_: self._enter(False)),
        )
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run one choice; a router's top-k returns the told choices and their scores."""
        if func in _HIGHEST:
            return self._highest(func, args, named)
        scores: torch.Tensor = args[0] if args else named["input"]
        k = int(args[1] if len(args) > 1 else named["k"])
        if not self._is_asked(scores, k):
            if self._is_of_groups(scores):
                self.groups = scores
            return func(*args, **named)
        self.scores, self.k, self._is_top_k = scores, k, True
        if self.choices is None:
            return func(*args, **named)
        chosen = self.choices.to(scores.device).flatten(0, -2)
        # A router that is asked for several batches at once answers each of them so.
        several = scores[..., 0].numel() // max(len(chosen), 1)
        chosen = chosen.repeat(several, 1).view(*scores.shape[:-1], -1)
        # A token that chose nothing is answered by the first place: -1 is no index.
        last = chosen[..., -1:].clamp_min(0)
        chosen = torch.where(chosen < 0, last, chosen)
        chosen = torch.cat([chosen, last.expand(*last.shape[:-1], k - chosen.shape[-1])], -1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def _highest(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run a maximum: of a router that chooses one after the other, among the told choices."""
        scores: torch.Tensor = args[0] if args else named["input"]
        given = {**dict(zip(("dim", "keepdim"), args[1:], strict=False)), **named}
        asked = given.get("dim") == -1 and given.get("keepdim") is True and not self._is_top_k
        if not (asked and self.experts == scores.shape[-1]):
            return func(*args, **named)
        # Later ones are of what the router masked, but for one that is called once more on logits
        # that it is fed: it chooses anew.
        if self.choices is None:
            if self.scores is None or not bool(scores.isneginf().any()):
                self.scores = scores
            return func(*args, **named)
        if self.k in (0, self.choices.shape[-1]):
            self.scores, self.k = scores, 0
        self.k += 1
        chosen = self.choices.to(scores.device).flatten(0, -2).view(*scores.shape[:-1], -1)
        # What it took before, the router has masked: the next best of the told choices is left.
        value, place = scores.gather(-1, chosen).max(dim=-1, keepdim=True)
        return torch.return_types.max((value, chosen.gather(-1, place)))

    def _is_of_groups(self, scores: torch.Tensor) -> bool:
        """Say whether a top-k is of as many ``scores`` for each token as there may be groups."""
        if self.experts is None or self.scores is not None or scores.dim() != 2:
            return False
        return 1 < scores.shape[-1] < self.experts and self.experts % scores.shape[-1] == 0

    def _is_asked(self, scores: torch.Tensor, k: int) -> bool:
        """Say whether a top-k of so many ``scores`` is the router's."""
        if self.experts is None:
            return self._inside
        by_expert = bool(scores.dim() and scores.shape[-1] == self.experts)
        return by_expert and (self.choices is None or k == self.choices.shape[-1])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use the calling thread alone, in work that is made of many small pieces.

    Each operation on a piece would end in waiting for the other threads: on a busy machine that
    takes ten times as long as the operation itself.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
