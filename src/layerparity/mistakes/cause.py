"""What a cause rule is given, what it answers, and how the answers are ranked.

A rule's file holds ``RULE: Rule``. Rules are pure: stored numbers in, a `Cause` or None out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from layerparity.anatomy.site import Site, overlap, within
from layerparity.mistakes.replayed import Replayed
from layerparity.record.guilt import SHOWN, SIGNS, WEIGHTS, Cause
from layerparity.record.verdict import Outcome, Row
from layerparity.record.weights import WeightFinding

if TYPE_CHECKING:
    from layerparity.mistakes.values import Values


def no_values(local: str) -> None:
    """Return nothing: a stored comparison is judged again without the tensors of its runs."""


@dataclass(frozen=True)
class Tokens:
    """Where each real token of a site stands, in the batch-major order of its token errors.

    ``sequence`` is the row of the batch, ``position`` counts the row's real tokens from 0, and
    ``padded`` holds the rows that have padding.
    """

    sequence: tuple[int, ...] = ()
    position: tuple[int, ...] = ()
    padded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Evidence:
    """What is known of the guilty place.

    ``rows``, ``token_errors`` and ``profiles`` are those of the guilty block in the guilty phase,
    by address inside the block (``mlp.gate:logits``); ``other_phase`` holds the block's rows of the
    prefill where the guilt is in a decode step. ``facts`` are the model's and the two runs'
    settings as text: ``num_attention_heads``, ``rotary_dim``, ``dtype``, ``golden_dtype``, and the
    candidate's ``port`` with its keys and ``tp_degree``, its number of ranks.
    ``weights_compared`` says that both ports told what weights their graphs hold; ``tensors`` are
    the checkpoint's tensors that the golden used there, none where it does not say. ``good`` are
    the addresses of the values that the guilty site is computed from, which pass; ``values`` gives
    a site's tensors on both sides, of the guilty pass, or None where they are not at hand.
    ``replayed`` is what came of planting known mistakes in the golden's block.
    """

    component: str
    part: str = ""
    site: Site | None = None
    layer: int | None = None
    rows: Mapping[str, Row] = field(default_factory=dict)
    other_phase: Mapping[str, Row] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    token_errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    findings: Sequence[WeightFinding] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    weights_compared: bool = False
    tensors: frozenset[str] = frozenset()
    good: tuple[str, ...] = ()
    values: Callable[[str], Values | None] = no_values
    replayed: Replayed = field(default_factory=Replayed)

    @property
    def local(self) -> str:
        """Address of the guilty site inside its block; empty where only weights tell."""
        return self.site.local if self.site else ""

    @property
    def errors(self) -> Sequence[float]:
        """Relative L2 error of every real token at the guilty site; empty where not measured."""
        return self.token_errors.get(self.local, ())

    def metric(self, name: str, local: str | None = None) -> float | None:
        """Return a metric of the guilty site, or of another of the block; None where absent."""
        row = self.rows.get(self.local if local is None else local)
        return row.metrics.get(name) if row else None

    def profile(self, group: str) -> Sequence[float]:
        """Return the guilty site's slopes by head, channel, expert or position; maybe empty."""
        return self.profiles.get(self.local, {}).get(f"slope_{group}", ())

    def failed(self, local: str) -> bool:
        """Say whether a site of the block fails."""
        row = self.rows.get(local)
        return row is not None and row.outcome is Outcome.FAIL

    def passed(self, local: str) -> bool:
        """Say whether a site of the block was judged and passes."""
        row = self.rows.get(local)
        return row is not None and row.outcome is Outcome.PASS

    def fact(self, name: str, default: int = 0) -> int:
        """Return a fact as a whole number, or a default where it is absent or is none."""
        text = self.facts.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else default

    @property
    def blamed(self) -> list[WeightFinding]:
        """The weight findings that can explain the guilty place: of it, inside it or around it.

        What is wrong with another component's weights is no reason for what this one puts out.
        """
        own = self.component
        return [each for each in self._kin(own) if overlap(each.component, own)]

    def findings_of(self, *whats: str, component: str | None = None) -> list[WeightFinding]:
        """Return the blamed findings of these kinds, or those of a module and what is below it."""
        if component is None:
            return [each for each in self.blamed if each.what in whats]
        inside = (each for each in self._kin(component) if within(each.component, component))
        return [each for each in inside if each.what in whats]

    def _kin(self, component: str) -> list[WeightFinding]:
        """Return the findings on modules; of the block itself, whose path is empty, only its own.

        The block's own weights are apart from those of its modules.
        """
        return [each for each in self.findings if bool(each.component) == bool(component)]


class Rule(Protocol):
    """One known cause."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause if the evidence points to it."""


__all__ = ["SHOWN", "SIGNS", "WEIGHTS", "Cause", "Evidence", "Rule", "Tokens"]
