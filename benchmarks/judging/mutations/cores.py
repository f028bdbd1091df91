"""The attention core goes wrong: its heads, its scale, or what it reads in a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from judging.mutations.base import Mutation, mutation
from layerparity.anatomy.site import DECODE
from layerparity.mistakes.attention_core import (
    Attend,
    attend_with,
    grouped_in_turn,
    has_cap,
    next_group,
    scaled,
    shares_keys,
    sinkless,
    two_groups_swapped,
    without,
)
from layerparity.mistakes.block import lacking
from layerparity.mistakes.fault import Surgery, WhyNot, everywhere


def foreseen_cores(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield attention cores wrong in a way that a rule was written for."""
    yield _core(
        "reads keys and values of groups in turn", grouped_in_turn, ("gqa_layout",), shares_keys
    )
    yield _core("reads the next group's keys and values", next_group, ("gqa_layout",), shares_keys)
    yield _core("swaps the first two groups", two_groups_swapped, ("gqa_layout",), shares_keys)
    for head in draw.sample(range(8), 2):
        yield _core(f"loses head {head}", _head_times(head, 0.0), ("one_head",))
    yield _core("reads its cache a slot late in decoding", _late_slot, ("decode_cache",), _decodes)
    yield _core("reads no newest key in decoding", _no_newest, ("decode_cache",), _decodes)
    yield _core("rounds what it reads to bfloat16", _rounded, ("precision",), _in_float32)


def strange_cores(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield attention cores wrong in a way that no rule was written for."""
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 1.5):
        yield _core(f"scales scores {factor:g} times", scaled(factor))
    permuted = ("channels_permuted",)
    yield _core("swaps two heads' contexts", _contexts_swapped, permuted)
    yield _core("leaves the soft cap out", without("softcap"), ("attention_option",), has_cap)
    missing = ("sinks_missing_in_window",)
    yield _core("leaves the sinks out", sinkless, missing, why_not=_has_sinks)
    yield _core("reads another group's values", _next_values, why_not=shares_keys)
    yield _core("gives out the token before's context", lambda usual: _after(usual, _delayed))
    yield _core("averages over the heads", lambda usual: _after(usual, _averaged))


def _core(
    story: str,
    around: Callable[[Attend], Attend],
    true: tuple[str, ...] = (),
    why_not: WhyNot = everywhere,
) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        attend_with(block, surgery, around)

    def lacks(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return lacking(block, "self_attn.num_key_value_groups") or why_not(block, dtype, phase)

    words = f"self_attn core {story}"
    return mutation("core", words, "self_attn", size=1.0, why_not=lacks, plant=plant, true=true)


def _decodes(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    return "" if phase == DECODE else "a prefill is right"


def _in_float32(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    return "" if dtype == torch.float32 else "what it reads is of a narrow type as it is"


def _has_sinks(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    return lacking(block, "self_attn.sinks")


def _next_values(usual: Attend) -> Attend:
    return lambda module, query, key, value, *rest, **named: usual(
        module, query, key, value.roll(1, 1), *rest, **named
    )


def _rounded(usual: Attend) -> Attend:
    def attend(module: Any, *args: Any, **named: Any) -> Any:
        coarse = (each.bfloat16().to(each.dtype) for each in args[:3])
        return usual(module, *coarse, *args[3:], **named)

    return attend


def _after(usual: Attend, change: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """Return a kernel whose context [batch, token, head, channel] is changed."""

    def attend(*args: Any, **named: Any) -> Any:
        context, *rest = usual(*args, **named)
        return (change(context), *rest)

    return attend


def _head_times(head: int, factor: float) -> Callable[[Attend], Attend]:
    def change(context: torch.Tensor) -> torch.Tensor:
        own = torch.arange(context.shape[2]) == head % context.shape[2]
        return torch.where(own.unsqueeze(-1), factor * context, context)

    return lambda usual: _after(usual, change)


def _contexts_swapped(usual: Attend) -> Attend:
    return _after(usual, lambda each: each[:, :, [1, 0, *range(2, each.shape[2])]])


def _delayed(context: torch.Tensor) -> torch.Tensor:
    return context.roll(1, 1)


def _averaged(context: torch.Tensor) -> torch.Tensor:
    return context.mean(2, keepdim=True).expand_as(context).contiguous()


def _late_slot(usual: Attend) -> Attend:
    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if query.shape[2] == 1:
            key, value = key.roll(1, 2), value.roll(1, 2)
        return usual(module, query, key, value, *rest, **named)

    return attend


def _no_newest(usual: Attend) -> Attend:
    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if query.shape[2] == 1:
            # What no token wrote is zero; the newest is the last that is not.
            written = key.abs().sum((0, 1, 3)).nonzero().flatten()
            key = key.index_fill(2, written[-1:], 0.0)
        return usual(module, query, key, value, *rest, **named)

    return attend
