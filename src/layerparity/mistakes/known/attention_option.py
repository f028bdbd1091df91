"""An option of the attention core is lost: its window, its soft cap, its sinks, its own scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from layerparity.ground.numeral import numeral
from layerparity.mistakes.block import config_of, find, head_dim
from layerparity.mistakes.fault import Fault, Pass, Surgery
from layerparity.mistakes.mutations.cores import Attend, attend_with, without
from layerparity.mistakes.mutations.shifts import additive

_CAUSE = "attention_option"


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the attention of a block with each of its options lost, and a window off by one."""
    attention = find(block, "self_attn")
    window = getattr(attention, "sliding_window", None)
    asked = getattr(config_of(block), "sliding_window", None)
    if window:
        yield _windowed(None, f"the window of {window} tokens is left out")
        for size in (window - 1, window + 1):
            yield _windowed(size, f"the window shows {size} tokens (the model's shows {window})")
    elif isinstance(asked, int):
        yield _windowed(asked, f"a window of {asked} tokens, which this layer does not have")
    if getattr(attention, "attn_logit_softcapping", None):
        yield _kernel("soft cap", "the soft cap of the scores is left out", without("softcap"))
    scale, size = getattr(attention, "scaling", None), head_dim(block)
    for own, words in ((size**-0.5 if size else 1.0, "head_dim^-0.5"), (1.0, "1")):
        if isinstance(scale, float) and abs(scale / own - 1) > 1e-6:
            yield _scale(own, f"scores are scaled by {words} (the model's by {numeral(scale, 4)})")


def _kernel(name: str, words: str, around: Callable[[Attend], Attend]) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        attend_with(block, surgery, around)

    return Fault(name, words, "self_attn", _CAUSE, plant=plant)


def _scale(factor: float, words: str) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.set(find(block, "self_attn"), "scaling", factor)

    return Fault(f"scaling {factor:g}", words, "self_attn", _CAUSE, plant=plant)


def _windowed(size: int | None, words: str) -> Fault:
    """Return attention that sees so many tokens, itself included; all before it for None."""

    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        mask = additive(None, each)
        new, seen = mask.shape[-2:]
        at, other = torch.arange(seen - new, seen)[:, None], torch.arange(seen)
        if size is not None:
            mask = mask.masked_fill(at - other >= size, torch.finfo(mask.dtype).min)
        return {**given, "attention_mask": mask}

    return Fault(f"window {size}", words, "self_attn", _CAUSE, arguments=arguments)


TRIES = tries
