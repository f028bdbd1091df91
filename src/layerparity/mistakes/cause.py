"""What a cause rule is given, what it answers, and how the answers are ranked.

A rule's file holds ``RULE: Rule``. Rules are pure: stored numbers in, a `Cause` or None out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layerparity.anatomy.site import Site
from layerparity.record.verdict import Outcome, Row


class Finding(Protocol):
    """One thing wrong with a weight: what the comparison of weight prints says of it."""

    @property
    def name(self) -> str:
        """The checkpoint's name of the tensor."""

    @property
    def component(self) -> str:
        """Module path inside the block."""

    @property
    def what(self) -> str:
        """What is wrong: never_loaded, changed_value, reordered, constant, missing, ..."""

    @property
    def text(self) -> str:
        """The finding in plain words."""


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
    settings as text: ``num_attention_heads``, ``rotary_dim``, ``dtype``, ``golden_dtype``, ...
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
    findings: Sequence[Finding] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)

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
    def blamed(self) -> list[Finding]:
        """The weight findings that can explain the guilty place: of it, inside it or around it.

        What is wrong with another component's weights is no reason for what this one puts out.
        """
        return [each for each in self.findings if _overlap(each.component, self.component)]

    def found(self, *whats: str, component: str | None = None) -> list[Finding]:
        """Return the blamed findings of these kinds, or those of a module and what is below it."""
        if component is None:
            return [each for each in self.blamed if each.what in whats]
        inside = (e for e in self.findings if f"{e.component}.".startswith(f"{component}."))
        return [each for each in inside if each.what in whats]


def _overlap(left: str, right: str) -> bool:
    """Say whether two components are one, or one is inside the other; the block's own are apart."""
    if not left or not right:
        return left == right
    return f"{left}.".startswith(f"{right}.") or f"{right}.".startswith(f"{left}.")


@dataclass(frozen=True)
class Cause:
    """A likely cause: its rule's id, how sure the rule is (0 to 1), a sentence, and its reasons."""

    id: str
    confidence: float
    sentence: str
    reasons: list[str] = field(default_factory=list)


class Rule(Protocol):
    """One known cause."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause if the evidence points to it."""
