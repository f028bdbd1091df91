"""Guilt: the first wrong place of a model, what speaks for it, and its likely causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from layerparity.anatomy.site import DECODE, Place, Site, within
from layerparity.ground.decode import encode
from layerparity.record.weights import WeightFinding

SHOWN, WEIGHTS, SIGNS = "shown", "weights", "signs"
# Rules that say that tensors are wrong, and not by which mistake.
OF_TENSORS = ("never_loaded", "weights_altered")


class Phases(StrEnum):
    """In which phases a place goes wrong, where the other one was judged and passes."""

    ANY = ""
    PREFILL_ONLY = "prefill_only"
    DECODE_ONLY = "decode_only"


@dataclass(frozen=True)
class Guilt:
    """The first place that goes wrong by itself.

    ``part`` narrows a module that has no smaller one (``rotary``, ``attention core``, ``residual
    add``). Where several modules may be at fault, ``suspects`` names all of them, ``place`` is the
    smallest that holds them, and ``between`` are the values, by their address in the block, that
    they lie between. ``site`` is the one that shows it, None where weights
    differ and no site fails. ``good`` are the site's inputs, which pass; ``unjudged`` those that
    were not judged, so that the fault may lie before them. ``also`` names the other places of the
    block that fail on good inputs. ``absorbed`` are tensors that differ though what they compute
    passes. ``first_step`` is the first decode step that shows it. Of a run with ``degree`` ranks,
    ``ranks`` are those at fault: some where others are right, all where each is wrong, none where
    that is not known.
    """

    place: Place
    part: str = ""
    suspects: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    site: Site | None = None
    good: tuple[Site, ...] = ()
    unjudged: tuple[Site, ...] = ()
    also: tuple[str, ...] = ()
    findings: tuple[WeightFinding, ...] = ()
    absorbed: tuple[str, ...] = ()
    phases: Phases = Phases.ANY
    first_step: int | None = None
    ranks: tuple[int, ...] = ()
    degree: int = 1

    def __str__(self) -> str:
        """Return the place with its part: ``layers.3.self_attn (rotary)``."""
        return f"{self.place} ({self.detail})" if self.detail else str(self.place)

    @property
    def detail(self) -> str:
        """What of the place it is: a part of it, or, of a whole block, between which values."""
        if self.between is None or self.place.module:
            return self.part
        return f"between {self.between[0]} and {self.between[1]}"

    @property
    def layer(self) -> int | None:
        """Index of the block, None outside the blocks."""
        return self.place.layer

    @property
    def component(self) -> str:
        """Module path inside the block; outside the blocks, the path."""
        return self.place.module

    @property
    def weights(self) -> WeightFinding | None:
        """What is wrong with the place's own weights, if they explain it."""
        for each in self.findings:
            # Of a block only its own weights count, not its modules'.
            own = within(each.component, self.component) if self.component else not each.component
            if own and each.name not in self.absorbed:
                return each
        return None

    @property
    def step(self) -> tuple[str, int]:
        """Phase and step of the pass that shows it."""
        return self.site.pass_step if self.site else Site("", "").pass_step

    @property
    def decoding(self) -> bool:
        """Whether only a decode step shows it."""
        return self.site is not None and self.site.phase == DECODE

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a record, and for programs ``layer``, which is no field."""
        return {**encode(self), "layer": self.layer}


@dataclass(frozen=True)
class Cause:
    """A likely cause: its rule's id, how often such a one is true (0 to 1), a sentence, reasons.

    ``findings`` on the weights are reasons, too; the others are in the rule's own words. ``grade``
    is what it rests on: ``shown`` where the mistake, worked out from stored tensors, gives the
    candidate's numbers to rounding; ``weights`` where the weights' prints say it; ``signs``
    where the errors look like it. ``alike`` are further rules' ids whose
    mistakes give the same numbers: it is one of them. ``cases`` is how often its rule said such a
    thing when that was measured: with 0, ``confidence`` is other rules' alone; None where it is
    not known.
    """

    id: str
    sentence: str
    reasons: Sequence[str] = ()
    findings: Sequence[WeightFinding] = ()
    grade: str = ""
    alike: tuple[str, ...] = ()
    cases: int | None = None
    confidence: float = 0.0

    @property
    def shown(self) -> bool:
        """Whether the cause gives the candidate's numbers to rounding."""
        return self.grade == SHOWN
