"""Outcome: what a pass through the stages leaves beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Site, SiteSpec
from layerparity.ground.profile import RunProfile
from layerparity.record.manifest import Feed, WeightPrint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Passed:
    """What one stage hands to the next: a tensor on the device, and its copy on the CPU."""

    device: torch.Tensor
    host: torch.Tensor


@dataclass
class Outcome:
    """What a pass through the stages leaves beside its tensors."""

    feeds: list[Feed] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    tensors_used: dict[str, dict[str, str]] = field(default_factory=dict)
    effective: dict[str, dict[str, WeightPrint]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    profile: RunProfile = field(default_factory=RunProfile)
    new_tokens: torch.Tensor | None = None
    reference: str = ""


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
