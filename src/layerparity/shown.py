"""Shown: what a run had at one stage, on the CPU, for whoever works beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.site import Site, SiteSpec

if TYPE_CHECKING:
    import torch

Tensors = dict[Site, "torch.Tensor"]
Specs = dict[Site, SiteSpec]


@dataclass(frozen=True)
class Shown:
    """A stage's input, whether it came from the stage before it, and its sites' tensors.

    ``given`` is [batch, token] ids or [batch, token, channel] states; ``step`` is the decode step,
    None in the prefill.
    """

    stage: str
    given: torch.Tensor
    chained: bool
    tensors: Tensors
    specs: Specs
    step: int | None = None
