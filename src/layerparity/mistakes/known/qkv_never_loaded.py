"""Key names do not match: the attention's projections keep their random initialisation."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.block import find, needs, randomise
from layerparity.mistakes.fault import Fault, Surgery

_WEIGHTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Fill the attention's projections with random numbers."""
    generator = surgery.generator()
    for path in _WEIGHTS:
        randomise(find(block, path), surgery.config.initializer_range, generator)


FAULT = Fault(
    "qkv_never_loaded",
    "key names did not match, attention ran on random weights, silently",
    component="self_attn.q_proj",
    cause="never_loaded",
    by_weights=True,
    why_not=needs(*_WEIGHTS),
    plant=plant,
    never_loaded=_WEIGHTS,
)
