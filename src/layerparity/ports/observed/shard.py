"""What one tensor-parallel rank computes of a module, and the sums over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from layerparity.anatomy.shards import HeadShare, spans
from layerparity.anatomy.sizes import EXPERT_KEYS
from layerparity.mistakes.parts import halves
from layerparity.ports.observed.observe import first_tensor

Forward = Callable[..., Any]
Spans = Sequence[tuple[int, int]]
# What grouped products want the rows of their matrices to be multiples of, in elements of 16 bits.
_ALIGNED = 8


def added(partials: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the sum of partial sums, of one shape and type, rounded after each of them."""
    total = next(partials)
    for partial in partials:
        total = total + partial
    return total


def by_rows(module: nn.Linear, rows: Spans) -> Forward:
    """Return a projection in parts of its outputs, put side by side."""

    def forward(given: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        return torch.cat(
            [
                linear(given, weight[first:end], None if bias is None else bias[first:end])
                for first, end in rows
                if end > first
            ],
            -1,
        )

    return forward


def by_columns(module: nn.Linear, columns: Spans) -> Forward:
    """Return a projection as the sum of products over parts of its inputs; the bias comes last."""

    def forward(given: torch.Tensor) -> torch.Tensor:
        total = added(
            linear(given[..., first:end], module.weight[:, first:end])
            for first, end in columns
            if end > first
        )
        return total if module.bias is None else total + module.bias

    return forward


def expert_shares(
    module: nn.Module, styles: Mapping[str, str], first: int, number: int, ranks: int
) -> Iterator[nn.Module]:
    """Yield what each of some ranks holds of experts ``first`` and on, ``number`` of them.

    The weights are [expert, row, column]; the bias of the last projection is the first rank's.
    """
    transposed = _is_transposed(module)
    width = module.get_parameter("down_proj").shape[-2 if transposed else -1]
    for rank, span in enumerate(spans(width, ranks)):
        if span[0] == span[1]:
            continue
        share = copy.copy(module)
        held: dict[str, Any] = {}
        for name, whole in module.named_parameters(recurse=False):
            own = whole[first : first + number]
            last = name.startswith("down_proj")
            if last and own.dim() < 3:
                own = own if rank == 0 else torch.zeros_like(own)
            else:
                inner = transposed == last and own.dim() > 2
                packed = styles.get(name, "").startswith("packed") or name.startswith("gate_up")
                own = _width(module, own, -2 if inner else -1, span, packed)
            held[name] = own
        share._parameters = held
        share.__dict__.update(dict.fromkeys(share.__dict__.keys() & set(EXPERT_KEYS), number))
        yield share


def _width(
    module: nn.Module, value: torch.Tensor, axis: int, span: tuple[int, int], packed: bool
) -> torch.Tensor:
    """Return a part of a weight's axis, filled up with zeros; of both halves where it has two."""
    first, end = span
    more = -(end - first) % _ALIGNED
    parts = halves(module, value, axis) if packed else (value,)
    own = [pad(each.movedim(axis, -1)[..., first:end], (0, more)) for each in parts]
    if getattr(module, "is_concatenated", True):
        whole = torch.cat(own, -1)
    else:
        whole = torch.stack(own, -1).flatten(-2)
    return whole.movedim(-1, axis).contiguous()


def _is_transposed(module: nn.Module) -> bool:
    """Say whether experts' weights are [expert, input, output]: the last one's output is hidden."""
    said = getattr(module, "is_transposed", None)
    if said is not None:
        return bool(said)
    name = "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj"
    down, stacked = module.get_parameter("down_proj"), module.get_parameter(name)
    return down.shape[-1] == stacked.shape[-2]


def among(routing: Sequence[torch.Tensor], first: int, number: int) -> tuple[torch.Tensor, ...]:
    """Return choices and weights [token, k] of experts ``first`` and on; others weigh nothing."""
    if len(routing) < 2:
        return tuple(routing)
    chosen, weights = routing
    held = (chosen >= first) & (chosen < first + number)
    if bool(held.all()):
        return chosen - first, weights
    return torch.where(held, chosen - first, 0), weights.masked_fill(~held, 0.0)


@contextmanager
def attention_by_rank(attending: Mapping[int, Sequence[HeadShare]], heads: int) -> Iterator[None]:
    """Let transformers' attention answer each rank's query heads by themselves.

    ``attending`` are the ranks' shares by the identity of the module that attends.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    look_up = INTERFACE.get_interface

    def wrapped(*args: Any, **kwargs: Any) -> Forward:
        attend = look_up(*args, **kwargs)

        def by_rank(
            owner: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *rest: Any,
            **named: Any,
        ) -> Any:
            if id(owner) not in attending or query.shape[1] != heads:
                return attend(owner, query, key, value, *rest, **named)
            contexts = []
            for share in attending[id(owner)]:
                held = list(share.kept if share.even else share.reads)
                own = _attending(owner, share, heads, len(held))
                each = [_of_heads(x, share, heads) for x in rest]
                others = {name: _of_heads(x, share, heads) for name, x in named.items()}
                asked = query[:, share.first : share.end]
                contexts.append(
                    first_tensor(attend(own, asked, key[:, held], value[:, held], *each, **others))
                )
            return torch.cat(contexts, 2), None

        return by_rank

    INTERFACE.get_interface = wrapped
    try:
        yield
    finally:
        INTERFACE.get_interface = look_up


def _attending(owner: nn.Module, share: HeadShare, heads: int, kv_heads: int) -> nn.Module:
    """Return attention as a rank has it: its own heads' weights, such as sinks, and its groups."""
    own = copy.copy(owner)
    own.__dict__["num_key_value_groups"] = len(share.reads) // kv_heads
    held = owner._parameters.items()
    own._parameters = {name: _of_heads(value, share, heads) for name, value in held}
    return own


def _of_heads(value: Any, share: HeadShare, heads: int) -> Any:
    """Return a rank's part of a mask [batch, head, ...] or of a number a head; others as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 1 and len(value) == heads:
        return value[share.first : share.end]
    if value.dim() == 4 and value.shape[1] == heads and heads > 1:
        return value[:, share.first : share.end]
    return value
