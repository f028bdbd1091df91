"""What a pass through a scope's stages hands on, shows and leaves beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerparity.anatomy.block import Block
from layerparity.anatomy.site import Site, SiteSpec
from layerparity.ground.profile import RunProfile
from layerparity.record.manifest import Feed, WeightPrint
from layerparity.record.ranks import RankRecord

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StageOutput:
    """What one stage hands to the next, on the device and copied to the CPU.

    Both are [batch, token, channel], or token ids [batch, token] before the embedding.
    """

    device: torch.Tensor
    host: torch.Tensor


@dataclass
class PassResult:
    """What a run has to tell of its stages, their tensors apart.

    ``weights`` are a hash by stage, ``tensors_used`` the digests by stage and stored name,
    ``effective`` prints of what the graph holds, likewise; ``skipped`` are reasons by site;
    ``new_tokens`` int64 [batch, new tokens]; ``reference`` the hash of the references' index;
    ``devices`` the types of those that stages' outputs lay on, ``computed_on`` what the port says;
    ``off`` is how many times too far a golden is off its reference, by site; ``ranks`` what its
    ranks held.
    """

    feeds: list[Feed] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    tensors_used: dict[str, dict[str, str]] = field(default_factory=dict)
    effective: dict[str, dict[str, WeightPrint]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    profile: RunProfile = field(default_factory=RunProfile)
    new_tokens: torch.Tensor | None = None
    reference: str = ""
    off: dict[Site, float] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    computed_on: str = ""
    blocks: dict[int, Block] = field(default_factory=dict)
    ranks: RankRecord = field(default_factory=RankRecord)


Tensors = dict[Site, "torch.Tensor"]
Specs = dict[Site, SiteSpec]


@dataclass(frozen=True)
class StageRecord:
    """One stage's input and site tensors on the CPU, as the reference evaluator receives them.

    ``given`` is int64 [batch, token] ids or floating [batch, token, channel] states, and
    ``chained`` says that it came from the stage before; ``tensors`` are [batch, token, ...], with
    axes as in ``specs``; ``step`` is the decode step, None in the prefill.
    """

    stage: str
    given: torch.Tensor
    chained: bool
    tensors: Tensors
    specs: Specs
    step: int | None = None
