"""Verdict: how each site of a comparison ends, and what that makes of the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import Exit


class Outcome(StrEnum):
    """How one site of a comparison ends; every site ends in exactly one of these."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a site, its metrics by name, how it ended and why."""

    site: Site
    kind: Kind
    outcome: Outcome
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the site as text, the enums as their values."""
        raw = asdict(self)
        raw.update(site=str(self.site), kind=self.kind.value, outcome=self.outcome.value)
        return raw

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Row:
        """Read what `to_dict` wrote."""
        return cls(
            Site.parse(raw["site"]),
            Kind(raw["kind"]),
            Outcome(raw["outcome"]),
            raw["reason"],
            dict(raw["metrics"]),
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict on the asked scope, and how much of the whole model that scope was.

    Raises ValueError on construction unless every site is counted exactly once.
    """

    total: int
    counts: dict[str, int]
    outcome: Outcome
    whole_model: str
    first_failure: str = ""

    def __post_init__(self) -> None:
        counted = sum(self.counts.values())
        if counted != self.total:
            raise ValueError(f"{self.total} sites were asked for, {counted} are accounted for")

    @property
    def exit(self) -> Exit:
        """Exit status of a command that ends with this verdict."""
        if self.outcome is Outcome.PASS:
            return Exit.OK
        return Exit.FAILED if self.outcome is Outcome.FAIL else Exit.INCONCLUSIVE


def sum_up(rows: list[Row], total: int, whole_model: str) -> Verdict:
    """Return the verdict of rows over ``total`` sites that were asked for.

    A failure decides; else a missing, inconclusive or wholly unjudged comparison is inconclusive.
    What a stage was fed judges nothing: something it computed must have passed.
    """
    counts = Counter(row.outcome.value for row in rows)
    failures = sorted(row.site for row in rows if row.outcome is Outcome.FAIL)
    if failures:
        outcome = Outcome.FAIL
    elif counts["missing"] or counts["inconclusive"] or not _computed(rows):
        outcome = Outcome.INCONCLUSIVE
    else:
        outcome = Outcome.PASS
    full = {each.value: counts[each.value] for each in Outcome}
    first = str(failures[0]) if failures else ""
    return Verdict(total, full, outcome, whole_model, first)


def open_to_doubt(verdict: Verdict) -> Verdict:
    """Return a pass as inconclusive: something that was asked for is not among its rows."""
    if verdict.outcome is not Outcome.PASS:
        return verdict
    return replace(verdict, outcome=Outcome.INCONCLUSIVE)


def _computed(rows: list[Row]) -> bool:
    return any(row.outcome is Outcome.PASS and row.site.end != "in" for row in rows)
