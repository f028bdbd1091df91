"""What ranks of tensor parallelism hold of a block, and what one of them gives alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from layerparity.anatomy.shards import Heads, spans
from layerparity.mistakes.block import config_of, find
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.parts import halves

DEGREES = (2, 4, 8, 16, 32, 64)
# Of more ranks only the first is tried: a rank that is looked at alone is that one.
_EACH = 16
Span = tuple[int, int]
# What a partial sum that goes on alone is refuted by: at each token a replay is held against it.
OF_OTHERS = "anything of the other ranks' parts in its sum"


def ranks_of(size: int, even: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the degrees that may share something of a ``size``, each with its ranks.

    ``even`` leaves out those that do not divide it.
    """
    for degree in DEGREES:
        if degree <= size and not (even and size % degree):
            yield from ((degree, rank) for rank in range(degree if degree <= _EACH else 1))


def heads_of(block: nn.Module) -> tuple[int, int]:
    """Return how many query heads and KV heads a block's attention has; 0 where it does not say."""
    config = config_of(block)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    return heads, int(getattr(config, "num_key_value_heads", 0) or heads)


def tilings(heads: int, kv_heads: int, own: int = 1) -> dict[tuple[int, ...], int]:
    """Return the KV head that each query head reads where KV heads are tiled, and over how many.

    Tiled, rank r holds KV head r mod their number; repeated, as it should be, it holds
    r // (ranks / kv_heads). Of degrees that come to the same, the run's ``own`` is said, else the
    first.
    """
    found: dict[tuple[int, ...], int] = {}
    usual = tuple(head // (heads // kv_heads) for head in range(heads))
    for degree in (own, heads, *DEGREES):
        if kv_heads == heads or degree <= kv_heads or degree % kv_heads:
            continue
        shares = enumerate(Heads(heads, kv_heads, degree).shares())
        reads = tuple(rank % kv_heads for rank, share in shares for _ in share.reads)
        if reads != usual:
            found.setdefault(reads, degree)
    return found


def tiled_over(degree: int | str) -> str:
    """Return what is wrong with tiled KV heads, as a cause says it."""
    over = f"{degree} ranks" if isinstance(degree, int) else degree
    return (
        f"KV heads are tiled over {over}: rank r reads KV head r mod their number, where "
        "neighbouring ranks should read the same"
    )


def o_proj_span(block: nn.Module, degree: int, rank: int) -> Span:
    """Return the inputs of ``o_proj`` that a rank holds: the channels of its query heads."""
    heads, kv_heads = heads_of(block)
    width = find(block, "self_attn.o_proj").weight.shape[1] // heads
    share = Heads(heads, kv_heads, degree).shares()[rank]
    return share.first * width, share.end * width


def part_of(module: Any, span: Span) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a linear layer over some of its inputs alone; its bias is added all the same."""
    first, end = span

    def forward(given: torch.Tensor) -> torch.Tensor:
        return linear(given[..., first:end], module.weight[:, first:end], module.bias)

    return forward


def expert_width(experts: Any) -> int:
    """Return how many inputs the last projection of each expert has."""
    return int(experts.down_proj.shape[-2 if _is_transposed(experts) else -1])


def width_of(experts: Any, span: Span, first: bool) -> Callable[..., torch.Tensor]:
    """Return experts of which each last projection has some of its inputs.

    Its bias is the ``first`` rank's.
    """

    def forward(*args: torch.Tensor) -> torch.Tensor:
        axis = -2 if _is_transposed(experts) else -1
        own, down = copy.copy(experts), experts.down_proj.detach()
        inside = torch.zeros_like(down).movedim(axis, -1)
        inside[..., span[0] : span[1]] = down.movedim(axis, -1)[..., span[0] : span[1]]
        bias = experts._parameters.get("down_proj_bias")
        lost = {} if first or bias is None else {"down_proj_bias": torch.zeros_like(bias)}
        own._parameters = {**experts._parameters, "down_proj": inside.movedim(-1, axis), **lost}
        result: torch.Tensor = type(experts).forward(own, *args)
        return result

    return forward


def number_of(span: Span, exact: Callable[..., Any]) -> Callable[..., Any]:
    """Return experts of which some are added up, by their number."""

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        held = (chosen >= span[0]) & (chosen < span[1])
        return exact(hidden, chosen, weights.masked_fill(~held, 0.0))

    return forward


def keep_slice(weight: torch.Tensor, degree: int, rank: int, filled: float) -> None:
    """Leave a rank its slice of a weight's first axis, in place; the rest is one number."""
    first, end = spans(len(weight), degree)[rank]
    with torch.no_grad():
        weight[:first] = filled
        weight[end:] = filled


def shift_experts(block: nn.Module, degree: int, rank: int) -> None:
    """Give a rank's experts the weights of the next rank's, in place."""
    for weight in find(block, "mlp.experts").parameters(recurse=False):
        shares = spans(len(weight), degree)
        (first, end), (start, stop) = shares[rank], shares[(rank + 1) % degree]
        with torch.no_grad():
            weight[first:end] = weight[start:stop].clone()


def shift_width(block: nn.Module, degree: int, rank: int) -> None:
    """Give a rank's part of every expert's width the weights of the next rank's, in place."""
    for view in _width_views(find(block, "mlp.experts")):
        shares = spans(view.shape[-1], degree)
        (first, end), (start, stop) = shares[rank], shares[(rank + 1) % degree]
        with torch.no_grad():
            view[..., first:end] = view[..., start:stop].clone()


def turn_experts(block: nn.Module, degree: int, rank: int, by: int) -> None:
    """Give a rank's part of every expert's width the weights ``by`` experts before, in place."""
    for view in _width_views(find(block, "mlp.experts")):
        first, end = spans(view.shape[-1], degree)[rank]
        with torch.no_grad():
            view[..., first:end] = view[..., first:end].roll(by, 0)


def _width_views(experts: Any) -> Iterator[torch.Tensor]:
    """Yield views [expert, ..., width] of the weights, gate and up each by itself."""
    outputs = -1 if _is_transposed(experts) else -2
    for name, value in experts.named_parameters(recurse=False):
        if not name.startswith("down_proj"):
            both = halves(experts, value.data, outputs if value.dim() == 3 else -1)
            yield from (each.movedim(outputs, -1) if each.dim() == 3 else each for each in both)
        elif value.dim() == 3:
            # Its bias is that of the whole, which one rank adds.
            yield value.data.movedim(-3 - outputs, -1)


def replace(block: nn.Module, surgery: Surgery, path: str, forward: Any) -> None:
    """Let a module of a block compute otherwise."""
    surgery.set(find(block, path), "forward", forward)


def _is_transposed(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", False))
