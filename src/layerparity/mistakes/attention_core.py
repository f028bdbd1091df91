"""The attention core of a block, as it is changed: its heads, its scale, what it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.mistakes.block import find
from layerparity.mistakes.fault import Pass, Surgery

# A kernel as transformers calls it: module, query, key, value [batch, head, token, channel], mask.
Attend = Callable[..., Any]


def attend_with(block: nn.Module, surgery: Surgery, around: Callable[[Attend], Attend]) -> None:
    """Let a block's attention use what ``around`` makes of its kernel.

    It stands below whoever observes queries, keys and context.
    """
    attention = find(block, "self_attn")

    def wrapped(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as KERNELS

            name = attention.config._attn_implementation
            eager = sys.modules[type(attention).__module__].eager_attention_forward
            # The table's own entries come before those of its class.
            KERNELS[name] = around(KERNELS.get(name, eager))
            try:
                return exact(*args, **named)
            finally:
                del KERNELS[name]

        return forward

    surgery.wrap(attention, wrapped)


def shares_keys(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why a block's heads share no keys, of which there are several; or nothing."""
    config = find(block, "self_attn.config")
    grouped = find(block, "self_attn.num_key_value_groups") or 1
    return "" if grouped > 1 and config.num_key_value_heads > 1 else "heads share no keys here"


def has_cap(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why a block has no soft cap on its scores; or nothing."""
    return "" if find(block, "self_attn.attn_logit_softcapping") else "this model has no soft cap"


def regrouped(order: Callable[[int, int], list[int]]) -> Callable[[Attend], Attend]:
    """Let query head h read the keys and values ``order(heads, groups)[h]``."""

    def around(usual: Attend) -> Attend:
        def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
            chosen = order(query.shape[1], key.shape[1])
            kept = module.num_key_value_groups
            module.num_key_value_groups = 1
            try:
                return usual(module, query, key[:, chosen], value[:, chosen], *rest, **named)
            finally:
                module.num_key_value_groups = kept

        return attend

    return around


grouped_in_turn = regrouped(lambda heads, groups: [h % groups for h in range(heads)])
next_group = regrouped(
    lambda heads, groups: [(h // (heads // groups) + 1) % groups for h in range(heads)]
)
two_groups_swapped = regrouped(
    lambda heads, groups: [
        {0: 1, 1: 0}.get(h // (heads // groups), h // (heads // groups)) for h in range(heads)
    ]
)


def scaled(factor: float) -> Callable[[Attend], Attend]:
    """Return what multiplies a kernel's scores."""
    return lambda usual: (
        lambda module, query, *rest, **named: usual(module, query * factor, *rest, **named)
    )


def without(name: str) -> Callable[[Attend], Attend]:
    """Return what takes an option, such as a soft cap, from a kernel."""
    return lambda usual: lambda *args, **named: usual(*args, **{**named, name: None})


def sinkless(usual: Attend) -> Attend:
    """Return a kernel without the sinks that its module holds."""

    def attend(module: Any, *args: Any, **named: Any) -> Any:
        kept = module.sinks.data
        module.sinks.data = torch.full_like(kept, torch.finfo(kept.dtype).min)
        try:
            return usual(module, *args, **named)
        finally:
            module.sinks.data = kept

    return attend


def additive(mask: torch.Tensor | None, each: Pass) -> torch.Tensor:
    """Return a mask [batch, 1, token, seen] as what is added to scores: 0, or the least number."""
    least = torch.finfo(each.dtype).min
    if mask is None:
        seen, new = each.attention_mask.shape[1], each.position_ids.shape[1]
        causal = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
        mask = (causal & each.attention_mask[:, None, :].bool())[:, None]
        # A cache of a fixed size gives more keys than are seen yet.
        mask = functional.pad(mask, (0, max(each.keys - seen, 0)))
    if mask.dtype is torch.bool:
        zero = torch.zeros(mask.shape, dtype=each.dtype)
        return zero.masked_fill(~mask, least)
    return mask.to(each.dtype)
