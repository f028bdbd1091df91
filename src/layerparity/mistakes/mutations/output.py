"""Output: one module gives out something else than it computed, its weights being right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import lacking
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.mutations.base import Mutation, mutation

# Relative to the spread of what the module gives out: far outside rounding, no caricature.
SIZE = 0.3


def wrong_output(path: str) -> Mutation:
    """Return the mistake of a module, by its path in the block, whose output is off by noise.

    The noise is the same for every token, so that it is a wrong function of what was fed, and of
    the size `SIZE` times the output's own spread.
    """

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return lacking(block, path)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(block.get_submodule(path), _disturbing)

    story = f"{path} gives out something else"
    return mutation("output", story, path, size=SIZE, why_not=why_not, plant=plant)


def _disturbing(exact: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        output = exact(*args, **named)
        if isinstance(output, tuple):
            return (_disturbed(output[0]), *output[1:])
        return _disturbed(output)

    return forward


def _disturbed(value: torch.Tensor) -> torch.Tensor:
    """Return a floating tensor [..., channel] with the same noise over the channels of each row."""
    seeded = torch.Generator().manual_seed(value.shape[-1])
    noise = torch.empty(value.shape[-1]).normal_(generator=seeded)
    return value + SIZE * value.float().std().to(value) * noise.to(value)
