"""What one rank does: the part of an implementation that runs in each rank's own process.

A `RanksPort` in the run's process drives as many of these as there are ranks, in lock step: every
method is called on all of them before the next one is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import SiteSpec
from layerparity.numbers.rank_parts import WHOLE, RankShare
from layerparity.ports.ranks import libraries

if TYPE_CHECKING:
    import torch

    from layerparity.anatomy.family import Family
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.ports.base import Call
    from layerparity.record.manifest import SitePatterns


# What a rank has of a cache, by what it is, and which part of the whole that is.
Cached = dict[str, tuple["torch.Tensor", RankShare]]


@dataclass(frozen=True)
class RankAssets:
    """What a rank is built from.

    ``dtype`` is torch's name; ``rank`` counts from 0 to ``count``; ``rendezvous`` is a file that
    the ranks meet at.
    """

    checkpoint: Checkpoint
    family: Family
    dtype: str
    wanted: SitePatterns
    rank: int
    count: int
    rendezvous: str


@dataclass
class RankObserved:
    """What one rank has of a stage: its part of the output, and of each site by its address.

    ``output`` and ``tensors`` are on the CPU, batch and token first. ``shares`` say which part of
    the whole each tensor is; one that has none is the whole. ``specs`` name the axes, ``unseen``
    gives a reason for each wanted site that is not shown.
    """

    output: torch.Tensor
    output_share: RankShare = WHOLE
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    specs: dict[str, SiteSpec] = field(default_factory=dict)
    shares: dict[str, RankShare] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a rank's modules hold of one stored tensor.

    ``values`` are of the stored shape; ``mask``, bool of that shape, says which of them the rank
    holds. ``differs`` says whether one of those is not the checkpoint's, cast to the same dtype.
    ``place`` is the parameter they stand in; empty where that has a name of the port's own: the
    golden's print says, then. A rank that should hold a part and holds none differs, too. What the
    modules hold may be ``computed`` from the tensor: then nobody knows whether it is right.
    """

    values: torch.Tensor
    mask: torch.Tensor
    place: str
    differs: bool
    computed: bool = False


class RankSide(ABC):
    """One rank of an implementation, in a process of its own, or with all others in one."""

    # Variables of its process, set before anything is imported there.
    environment: Mapping[str, str] = {}
    # Whether one process runs all ranks, as a device does that one process drives.
    together = False

    def __init__(self, assets: RankAssets, **keys: Any) -> None:
        self.assets = assets

    @classmethod  # noqa: B027
    def prepare(cls, keys: Mapping[str, Any]) -> None:
        """Import what takes seconds: done once, before the ranks are forked off.

        ``keys`` are the port's. Raises UserError with the cure.
        """

    @classmethod  # noqa: B027
    def meet(cls, sides: Sequence[Any]) -> None:
        """Tell ranks of one process of each other, in the order of ranks, before they start."""

    def facts(self) -> dict[str, str]:
        """Return what is to be remembered of the rank so far, as tags."""
        return {}

    def notes(self) -> list[str]:
        """Return lines that the user is to read, once each."""
        return []

    def libraries(self) -> dict[str, str]:
        """Return what this rank computes with: each library's version and file, by its name."""
        return libraries.loaded()

    @abstractmethod
    def start(self) -> dict[str, str]:
        """Join the other ranks, in a process group of torch.distributed; return facts as tags."""

    @abstractmethod
    def place(self, stages: Sequence[str]) -> int:
        """Check that the stages can be run, without reading weights; return the bytes they take."""

    @abstractmethod
    def load(self, stage: str) -> dict[str, str]:
        """Load a stage's weights; return the hash of every checkpoint tensor used, by name."""

    def held(self, stage: str) -> dict[str, Held]:
        """Return what the rank's modules hold of a loaded stage's stored tensors, by their names.

        Empty where the implementation cannot tell.
        """
        return {}

    @abstractmethod
    def begin(self, call: Call) -> None:
        """Prepare a pass; ``call.cache`` is true where it has one."""

    @abstractmethod
    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Run one stage on ``given``: int64 [batch, token] ids, or [batch, token, channel]."""

    @abstractmethod
    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Make a cache for ``max_tokens`` tokens a sequence. Raises UserError without."""

    def cache_rows(self, stage: str) -> Cached:
        """Return what the last pass left in a stage's cache, [batch, token, head, channel].

        Tokens are all that were seen, padding among them. Empty where the rank shows none.
        """
        return {}

    def release(self, stage: str) -> None:  # noqa: B027
        """Give a stage's memory back."""
