"""The output projection's key is renamed twice: its weight keeps its random initialisation."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.block import find, needs, randomise
from layerparity.mistakes.fault import Fault, Surgery

_WEIGHT = "self_attn.o_proj.weight"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Fill the output projection with random numbers."""
    randomise(find(block, _WEIGHT), surgery.config.initializer_range, surgery.generator())


FAULT = Fault(
    "o_proj_renamed_twice",
    "o_proj.o_proj.o_proj.weight: the weight was never loaded",
    component="self_attn.o_proj",
    cause="never_loaded",
    by_weights=True,
    why_not=needs(_WEIGHT),
    plant=plant,
    never_loaded=(_WEIGHT,),
)
