"""A module's output goes wrong: computed in a narrower type, rounded to it, or off by noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from judging.mutations.base import Mutation, mutation
from layerparity.mistakes.block import lacking
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.parts import parts
from layerparity.mistakes.wrong_output import Change, output_changed
from layerparity.numbers.arithmetic import Widen

# Bits of the significand, the hidden one included, and the largest number.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
NARROW = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}


def precision(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield every module of a block in every narrower type, computing in it or rounding to it.

    What transformers computes in float32 whatever the run's type, a norm, a router or a softmax, is
    also computed in the run's own.
    """
    modules = [part.component for part in parts(block)] + ["self_attn", "mlp"]
    for path in dict.fromkeys(modules):
        for narrow in NARROW:
            for computes in (True, False):
                yield _narrowed(path, narrow, computes)
        if path.endswith(("norm", "mlp.gate", "mlp.router", "self_attn")):
            yield _without_float32(path)


def rounded(value: Any, narrow: torch.dtype) -> Any:
    """Return a floating tensor, or a tuple of them, rounded to a narrower type and back.

    Shape and dtype stay; numbers past the narrow type's largest become that. Anything else is
    returned as it is.
    """
    if isinstance(value, tuple):
        return tuple(rounded(each, narrow) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    largest = torch.finfo(narrow).max
    return value.clamp(-largest, largest).to(narrow).to(value.dtype)


def _narrowed(path: str, narrow: torch.dtype, computes: bool) -> Mutation:
    """Return a module that rounds its output; with ``computes`` its weights and input as well."""
    name = str(narrow).removeprefix("torch.")

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            if computes and args:
                args = (rounded(args[0], narrow), *args[1:])
            return rounded(exact(*args, **named), narrow)

        return forward

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
        surgery.wrap(module, around)

    story = f"{path} {'computes in' if computes else 'rounds its output to'} {name}"
    size = 2.0 ** -NARROW[narrow]
    return mutation(
        "precision",
        story,
        path,
        size=size,
        why_not=why_not,
        plant=plant,
        by_weights=computes,
        true=("precision", "weights_altered") if computes else ("precision",),
    )


def _without_float32(path: str) -> Mutation:
    """Return a module that keeps to the run's own 16-bit type where the model goes to float32."""

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            given = next(
                each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)
            )
            with Widen(given.dtype):
                return exact(*args, **named)

        return forward

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        if dtype.itemsize > 2:
            return f"a run in {str(dtype).removeprefix('torch.')} computes everything in it"
        return lacking(block, path)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(block.get_submodule(path), around)

    story = f"{path} computes nothing in float32"
    return mutation("precision", story, path, size=2.0**-8, why_not=why_not, plant=plant)


def given_out(
    kind: str,
    story: str,
    path: str,
    change: Change,
    true: tuple[str, ...] = (),
    *,
    size: float = 1.0,
) -> Mutation:
    """Return the mistake of a module, by its path, whose output is what ``change`` makes of it.

    ``change`` takes and returns a floating tensor [..., token, channel] of one shape and dtype.
    """
    why_not, plant = output_changed(path, change)
    return mutation(kind, story, path, size=size, why_not=why_not, plant=plant, true=true)
