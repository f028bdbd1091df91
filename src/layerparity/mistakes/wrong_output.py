"""A module's output goes wrong: it is another function of what was fed, well above rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.site import EMBEDDING, within
from layerparity.mistakes.block import lacking
from layerparity.mistakes.fault import BLOCK, Fault, Plant, Surgery, WhyNot

# Of a floating tensor [..., token, channel]: one of its shape.
Change = Callable[[torch.Tensor], torch.Tensor]
# Of the noise, relative to the spread of what the module gives out: far outside rounding, no
# caricature.
SIZE = 0.3


def output_changed(path: str, change: Change) -> tuple[WhyNot, Plant]:
    """Return why the output of a module, by its path, cannot be changed so, and what changes it.

    ``change`` takes and returns a floating tensor [..., token, channel] of one shape and dtype.
    """

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return lacking(block, path)

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            output = exact(*args, **named)
            if isinstance(output, tuple):
                return (change(output[0]).to(output[0].dtype), *output[1:])
            return change(output).to(output.dtype)

        return forward

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(block.get_submodule(path), around)

    return why_not, plant


def wrong_output(path: str) -> Fault:
    """Return the mistake of a module, by its path in the block, whose output is off by noise.

    The noise is the same for every token, so that it is a wrong function of what was fed, and of
    the size `SIZE` times the output's own spread. The embedding, or a module of it, is named from
    there: ``embed_tokens.wpe``.
    """
    outside = within(path, EMBEDDING)
    inside = path.removeprefix(EMBEDDING).removeprefix(".") if outside else path
    why_not, plant = output_changed(inside, _disturbed)
    story = f"{path} gives out something else"
    stage = EMBEDDING if outside else BLOCK
    name = f"output {story}".replace(" ", "-")
    return Fault(name, story, path, "output", why_not=why_not, plant=plant, stage=stage)


def _disturbed(value: torch.Tensor) -> torch.Tensor:
    """Return a floating tensor [..., channel] with the same noise over the channels of each row."""
    seeded = torch.Generator().manual_seed(value.shape[-1])
    noise = torch.empty(value.shape[-1]).normal_(generator=seeded)
    return value + SIZE * value.float().std().to(value) * noise.to(value)
