"""Precision: one module computes in a narrower type than the run's, or rounds its output to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import lacking
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.mutations.base import Mutation, mutation
from layerparity.mistakes.parts import parts

# Bits of the significand, the hidden one included, and the largest number.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
NARROW = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}


def precision(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield every module of a block in every narrower type, computing in it or rounding to it."""
    modules = [part.component for part in parts(block)] + ["self_attn", "mlp"]
    for path in dict.fromkeys(modules):
        for narrow in NARROW:
            for computes in (True, False):
                yield _narrowed(path, narrow, computes)


def rounded(value: Any, narrow: torch.dtype) -> Any:
    """Return floating tensors rounded to a narrower type and back, saturating; others as given."""
    if isinstance(value, tuple):
        return tuple(rounded(each, narrow) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    largest = torch.finfo(narrow).max
    return value.clamp(-largest, largest).to(narrow).to(value.dtype)


def _narrowed(path: str, narrow: torch.dtype, computes: bool) -> Mutation:
    name = str(narrow).removeprefix("torch.")

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        if _BITS.get(dtype, 0) <= NARROW[narrow]:
            return f"a run in {str(dtype).removeprefix('torch.')} is no wider than {name}"
        return lacking(block, path)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        module = block.get_submodule(path)
        if computes:
            with torch.no_grad():
                for weight in module.parameters():
                    weight.copy_(rounded(weight, narrow))
        surgery.wrap(module, lambda exact: _rounding(exact, narrow, computes))

    story = f"{path} {'computes in' if computes else 'rounds its output to'} {name}"
    size = 2.0 ** -NARROW[narrow]
    return mutation(
        "precision", story, path, size=size, why_not=why_not, plant=plant, by_weights=computes
    )


def _rounding(
    exact: Callable[..., Any], narrow: torch.dtype, inputs_too: bool
) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        if inputs_too and args:
            args = (rounded(args[0], narrow), *args[1:])
        return rounded(exact(*args, **named), narrow)

    return forward
