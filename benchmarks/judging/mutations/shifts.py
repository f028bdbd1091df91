"""Shifts: positions, the mask, channels, heads, experts or their number are off by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from judging.mutations.base import (
    HEAD_COLUMNS,
    HEAD_ROWS,
    Mutation,
    mutation,
    of_weight,
)
from judging.mutations.weights import ORDERED
from layerparity.mistakes.attention_core import additive
from layerparity.mistakes.block import config_of, find, head_dim, lacking, needs
from layerparity.mistakes.fault import ChangeArguments, Pass, Surgery, WhyNot
from layerparity.mistakes.parts import Part, parts
from layerparity.mistakes.rotary_tables import no_plain_tables, parameters, tables

_NEEDS_HEADS = needs("self_attn.head_dim")
_AXES = (("experts", 0), ("channels", 1), ("inputs", 2))


def shifts(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield everything of a block that can be off by one."""
    for part in parts(block):
        yield from _of_part(part, block)
    for by in (1, -1):
        yield _top_k(by)
        yield _positions(by, from_=0)
        yield _dimensions(2 * by)
    for gap in sorted(draw.sample(range(1, 12), 4)):
        yield _positions(1, from_=gap)
    yield _mask("sees one token ahead", _shown_ahead, ("mask_off_by_one",))
    yield _mask("forgets the first token", _without_first)


def _of_part(part: Part, block: nn.Module) -> Iterator[Mutation]:
    """Yield a weight's experts, channels, inputs and heads, each shifted by one."""
    shape, size = part.view(block).shape, head_dim(block)
    for by in (1, -1):
        for what, axis in _AXES:
            if shape[axis] > 1:
                yield _roll(part, what, axis, by, by)
        if size and part.name in HEAD_ROWS and shape[1] > size:
            yield _roll(part, "heads", 1, by, by * size)
        if size and part.name == HEAD_COLUMNS:
            yield _roll(part, "heads", 2, by, by * size)


def _roll(part: Part, what: str, axis: int, by: int, steps: int) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        view = part.view(block)
        with torch.no_grad():
            view.copy_(view.roll(steps, axis))

    story = f"{part.name} {what} shifted by {by:+d}"
    true = ORDERED.get((what, axis), ())
    return of_weight("shift", story, part, size=1.0, place=(0, 0, 0), plant=plant, true=true)


def _top_k(by: int) -> Mutation:
    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        gone = lacking(block, "mlp.gate.top_k")
        if gone:
            return gone
        wanted = find(block, "mlp.gate.top_k") + by
        most = find(block, "mlp.gate.num_experts")
        return "" if 1 <= wanted <= most else f"{wanted} of {most} experts cannot be chosen"

    def plant(block: nn.Module, surgery: Surgery) -> None:
        gate = find(block, "mlp.gate")
        surgery.set(gate, "top_k", gate.top_k + by)

    return mutation(
        "shift",
        f"mlp.gate chooses {by:+d} experts",
        "mlp.gate",
        size=1.0,
        why_not=why_not,
        plant=plant,
    )


def _positions(by: int, from_: int) -> Mutation:
    """Shift the positions from ``from_`` on, none below 0."""

    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        ids = each.position_ids
        shifted = torch.where(ids >= from_, (ids + by).clamp(min=0), ids)
        return {**given, "position_embeddings": each.tables(shifted)}

    which = f"positions from {from_} on" if from_ else "all positions"
    return _changed(f"{which} by {by:+d}", arguments, true=("rotary",))


def _dimensions(more: int) -> Mutation:
    """Rotate two dimensions more, or fewer, than the model does."""

    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        dims = given["position_embeddings"][0].shape[-1] + more
        theta = parameters(each.config)["rope_theta"]
        return {**given, "position_embeddings": tables(each.position_ids, dims, theta, each.dtype)}

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        reason = no_plain_tables(block)
        if reason:
            return reason
        whole = parameters(config_of(block)).get("partial_rotary_factor", 1.0) == 1.0
        return "this model rotates whole heads" if whole else ""

    return _changed(f"rotated dimensions by {more:+d}", arguments, why_not, true=("rotary",))


def _mask(
    story: str, change: Callable[[torch.Tensor], torch.Tensor], true: tuple[str, ...] = ()
) -> Mutation:
    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        mask = additive(given.get("attention_mask"), each)
        # A cache has room for more tokens, whether or not transformers' mask has.
        seen, keys = each.attention_mask.shape[1], max(each.keys, mask.shape[-1])
        changed = change(mask[..., :seen])
        least, empty = torch.finfo(mask.dtype).min, keys - changed.shape[-1]
        return {**given, "attention_mask": functional.pad(changed, (0, empty), value=least)}

    return _changed(f"mask {story}", arguments, true=true)


def _changed(
    story: str,
    arguments: ChangeArguments,
    why_not: WhyNot = _NEEDS_HEADS,
    true: tuple[str, ...] = (),
) -> Mutation:
    """Return a mutation of what attention is passed."""
    words = f"self_attn {story}"
    return mutation(
        "shift", words, "self_attn", size=1.0, why_not=why_not, arguments=arguments, true=true
    )


def masks(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield masks that hide, or show, what no rule was written for."""
    for token in draw.sample(range(2, 14), 3):
        yield _mask(f"never shows token {token}", _hole(token))
        yield _mask(f"hides all before token {token} from those after", _cut_at(token))
    yield _mask("shows every second token alone", _every_second)


def _shown_ahead(mask: torch.Tensor) -> torch.Tensor:
    return mask[..., [0, *range(mask.shape[-1] - 1)]]


def _hidden(mask: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Hide what is true in bool [token, seen], but to no token itself."""
    new, seen = mask.shape[-2:]
    own = torch.arange(seen - new, seen)[:, None] == torch.arange(seen)
    return mask.masked_fill(hidden & ~own, torch.finfo(mask.dtype).min)


def _hole(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda mask: _hidden(mask, (torch.arange(mask.shape[-1]) == token)[None])


def _cut_at(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(mask: torch.Tensor) -> torch.Tensor:
        new, seen = mask.shape[-2:]
        later = torch.arange(seen - new, seen)[:, None] >= token
        return _hidden(mask, later & (torch.arange(seen) < token))

    return change


def _every_second(mask: torch.Tensor) -> torch.Tensor:
    return _hidden(mask, (torch.arange(mask.shape[-1]) % 2 == 1)[None])


def _without_first(mask: torch.Tensor) -> torch.Tensor:
    first = torch.arange(mask.shape[-1]) == 0
    # The first token itself must see something.
    later = torch.arange(mask.shape[-2])[:, None] > 0
    return mask.masked_fill(first & later, torch.finfo(mask.dtype).min)
