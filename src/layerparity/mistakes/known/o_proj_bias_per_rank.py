"""Each rank adds the bias of o_proj to its partial sum: it is there as often as there are ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import find, lacking, needs
from layerparity.mistakes.fault import Fault, Plant, Surgery
from layerparity.mistakes.ranks import DEGREES

_PATH, _CAUSE = "self_attn.o_proj", "o_proj_bias_per_rank"


def _plant(block: nn.Module, surgery: Surgery, degree: int) -> None:
    module: Any = find(block, _PATH)

    def around(exact: Callable[..., torch.Tensor]) -> Any:
        return lambda given: exact(given) + (degree - 1) * module.bias

    surgery.wrap(module, around)


def _added(degree: int) -> Fault:
    words = (
        f"the bias of o_proj is added on each of {degree} ranks, and {degree} times in their sum"
    )
    plant: Plant = partial(_plant, degree=degree)
    name = f"o_proj.bias of {degree} ranks"
    return Fault(name, words, _PATH, _CAUSE, plant=plant, refines=("offset",), degree=degree)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the bias as often as other numbers of ranks add it."""
    if not lacking(block, f"{_PATH}.bias"):
        yield from map(_added, DEGREES[1:])


TRIES = tries
_FIRST = _added(2)
FAULT = Fault(
    "o_proj_bias_per_rank",
    _FIRST.story,
    component=_PATH,
    cause=_CAUSE,
    why_not=needs(f"{_PATH}.bias"),
    plant=_FIRST.plant,
    refines=_FIRST.refines,
    degree=_FIRST.degree,
)
