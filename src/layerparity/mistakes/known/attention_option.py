"""An option of the attention core is lost: its window, its soft cap, its sinks, its own scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from layerparity.ground.numeral import numeral
from layerparity.mistakes.attention_core import Attend, additive, attend_with, without
from layerparity.mistakes.block import config_of, find, head_dim
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass, Surgery

_CAUSE = "attention_option"
# Of attention with latent keys and values (MLA), whose scores are those of several widths.
_WIDTHS = ("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


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
    scale = getattr(attention, "scaling", None)
    if isinstance(scale, float):
        for own, words in _scales(attention, head_dim(block)).items():
            if abs(scale / own - 1) > 1e-6:
                said = f"scores are scaled by {words} (the model's by {numeral(scale, 4)})"
                yield _scale(own, said)


def _scales(attention: nn.Module, size: int) -> dict[float, str]:
    """Return what else scores are scaled by, by its number: 1, and by widths of the attention."""
    widths = {name: getattr(attention, name, None) for name in _WIDTHS}
    latent, rotated = getattr(attention, "kv_lora_rank", None), widths["qk_rope_head_dim"]
    if latent and rotated:
        # What is as wide as the keys are where their projection is folded into the queries.
        widths["(kv_lora_rank + qk_rope_head_dim)"] = latent + rotated
    found: dict[float, list[str]] = {1.0: ["1"]}
    for name, width in ({"head_dim": size} | widths).items():
        if isinstance(width, int) and width > 0:
            found.setdefault(width**-0.5, []).append(f"{name}^-0.5")
    return {number: " or ".join(names) for number, names in found.items()}


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

    def arguments(given: Arguments, each: Pass) -> NewArguments:
        mask = additive(None, each)
        new, seen = mask.shape[-2:]
        at, other = torch.arange(seen - new, seen)[:, None], torch.arange(seen)
        if size is not None:
            mask = mask.masked_fill(at - other >= size, torch.finfo(mask.dtype).min)
        return {**given, "attention_mask": mask}

    return Fault(f"window {size}", words, "self_attn", _CAUSE, arguments=arguments)


TRIES = tries
