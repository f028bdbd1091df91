"""KV heads were tiled over the ranks where each should be repeated on neighbouring ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from layerparity.mistakes.attention_core import attend_with, regrouped, shares_keys
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.ranks import heads_of, tiled_over, tilings

# Another layout of key and value heads is one cause, whatever made it.
_CAUSE = "gqa_layout"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Tile the KV heads over as many ranks as there are query heads."""
    reads = next(iter(tilings(*heads_of(block))))
    attend_with(block, surgery, regrouped(lambda heads, groups: list(reads)))


FAULT = Fault(
    "kv_heads_tiled",
    tiled_over("as many ranks as there are query heads"),
    component="self_attn",
    cause=_CAUSE,
    why_not=shares_keys,
    plant=plant,
)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield KV heads tiled over other numbers of ranks than that of the query heads."""
    if shares_keys(block, torch.float32, ""):
        return
    for reads, degree in list(tilings(*heads_of(block)).items())[1:]:
        yield _tiled(degree, reads)


def _tiled(degree: int, reads: Sequence[int]) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        attend_with(block, surgery, regrouped(lambda heads, groups: list(reads)))

    words, name = tiled_over(degree), f"kv heads over {degree}"
    cause, why_not = _CAUSE, shares_keys
    return Fault(name, words, "self_attn", cause, why_not=why_not, plant=plant, degree=degree)


TRIES = tries
