"""What every port offers: how the blocks of the judged implementation are loaded and run.

conf/port names a port by ``_target_``, which is called with `Assets` and the group's other keys and
returns a `Port`. At bottom a port is a function that returns ``(output, {site: tensor})``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.ranks import RankRecord

if TYPE_CHECKING:
    import torch

    from layerparity.anatomy.block import Block
    from layerparity.anatomy.family import Family
    from layerparity.backends.base import Backend
    from layerparity.machine.device import Placed
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.record.manifest import WeightPrint
    from layerparity.settings.config import Config


@dataclass(frozen=True)
class Assets:
    """What a port is built from: the checkpoint, its family, the machine, and what to observe.

    ``recorded`` are by block what the golden that feeds it recorded there, by site inside the
    block: also what is in no family's table.
    """

    checkpoint: Checkpoint
    family: Family
    backend: Backend
    config: Config
    wanted: Any
    recorded: Mapping[str, Mapping[str, SiteSpec]] = field(default_factory=dict)


@dataclass
class Call:
    """One pass over the batch.

    ``attention_mask`` [batch, seen tokens] and ``position_ids`` [batch, token] are int64 on the
    CPU; ``tokens`` is the number of new tokens; ``cache`` is whatever the port keeps between
    passes, or None for a pass without one. ``choices`` are the experts that each block's router is
    told to choose, int64 [batch, token, k], by layer; without an entry a router chooses itself.
    ``attended`` are the tokens that each block's attention is told to look at, in the same form; -1
    is none. ``fed`` are by layer the values, floating [batch, token, ...] by their site inside the
    block, that go on there in place of what is computed; of rotated keys those of former passes
    come first. ``handed`` is what stages handed on to later ones beside their state, of any shape
    and dtype on the CPU, by name: a port's own, and empty for another pass. ``kept`` are the tokens
    that are looked at inside a stage; a port may show all.
    """

    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    cache: Any = None
    choices: Mapping[int, torch.Tensor] = field(default_factory=dict)
    attended: Mapping[int, torch.Tensor] = field(default_factory=dict)
    fed: Mapping[int | None, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    handed: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    kept: KeptTokens = field(default_factory=KeptTokens)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return int(self.position_ids.shape[0])

    @property
    def tokens(self) -> int:
        """Number of new tokens in each sequence."""
        return int(self.position_ids.shape[1])


@dataclass
class Observed:
    """What a stage gave: its output, and tensors by site address inside the stage's block.

    ``output``, floating [batch, token, channel], stays on the device. ``tensors`` are on the CPU in
    canonical layout, [batch, token, ...]; ``specs`` name their axes. ``unseen`` gives a reason for
    each wanted site the port cannot show.
    """

    output: torch.Tensor
    tensors: dict[str, torch.Tensor]
    specs: dict[str, SiteSpec]
    unseen: dict[str, str] = field(default_factory=dict)


class Port(ABC):
    """An implementation of a model, run stage by stage.

    A stage is ``embed_tokens``, ``layers.N``, a component such as ``layers.N.mlp``, ``norm`` or
    ``lm_head``. With ``takes_any_tokens`` the last one may be given some tokens of a pass alone.
    """

    takes_any_tokens = False

    @classmethod  # noqa: B027
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse keys of ``port`` that cannot be meant; called before torch is imported.

        Raises UserError with the cure.
        """

    @abstractmethod
    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Check that the stages can be loaded and run, and decide where each one goes.

        Nothing is read but headers. Raises UserError with the cure.
        """

    def blocks(self) -> dict[int, Block]:
        """Return what is computed from what in the blocks of the placed stages, by layer.

        Empty where the port does not know: a comparison then goes by the family's own structure.
        """
        return {}

    @abstractmethod
    def load(self, stage: str) -> dict[str, str]:
        """Load a stage's weights; return the hash of every checkpoint tensor used, by name."""

    def expect(self, stage: str | None) -> None:  # noqa: B027
        """Begin to read a stage's weights: it is the one that is loaded next.

        For None nothing is to be read ahead, and what was kept for it may be given back.
        """

    def spent(self, stage: str) -> Spent:
        """Return what reading a stage's weights took, when it was loaded last."""
        return Spent()

    def effective_weights(self, stage: str) -> dict[str, WeightPrint]:
        """Return a print of what a loaded stage's graph really holds, by the stored names.

        Empty where the port does not say. `layerparity.model.prints.print_of` makes a print; what
        the checkpoint says to it may be left open.
        """
        return {}

    @abstractmethod
    def begin(self, call: Call) -> None:
        """Prepare a pass: masks, positions and rotary tables for every stage."""

    @abstractmethod
    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage on ``given``: int64 [batch, token] ids, or [batch, token, channel]."""

    @abstractmethod
    def new_cache(self, batch: int, max_tokens: int) -> Any:
        """Return a static cache for ``max_tokens`` tokens a sequence. Raises UserError without."""

    def computes_on(self) -> str:
        """Return what stages compute on, where their outputs do not lie there; else nothing.

        A graph that was compiled ahead takes and gives tensors of the CPU.
        """
        return ""

    def rank_record(self) -> RankRecord:
        """Return which rank held what, and whose replicas disagreed, of a port of several ranks."""
        return RankRecord()

    def cache_rows(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what a stage's cache holds after a pass, on the CPU, by what it is.

        ``keys`` and ``values`` are [batch, token, head, channel] of all tokens that were seen, or
        of the last ones that a window keeps; states are [batch, ...]. Empty where the port shows
        none.
        """
        return {}

    def cached(self, stage: str) -> dict[str, torch.Tensor] | None:
        """Return what the last pass put into its cache at a stage, on the CPU, by names of its own.

        None where the port does not say: a run that generates, or whose stages hand on more than
        their state, is then not resumed.
        """
        return None

    def refill(self, stage: str, cached: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Put what `cached` returned into the cache of the pass that was begun, in that order."""

    def taking_back(self, stage: str) -> Callable[[], None]:
        """Return what makes the cache of the pass that was begun, at a stage, what it is now.

        Called after further tokens were put in, it takes them back, as speculation does. Raises
        UserError where the port cannot.
        """
        raise UserError(
            f"{type(self).__name__} takes no tokens back from its cache",
            "leave job.draft out, or define taking_back(stage).",
        )

    def release(self, stage: str) -> None:  # noqa: B027
        """Give a stage's memory back."""
