"""What every tolerance offers. Its file holds ``Settings``, whose values come from YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from layerparity.anatomy.site import Kind
from layerparity.ground.errors import UserError
from layerparity.numbers.closeness import Closeness
from layerparity.record.verdict import SIMILARITIES, Breach, Outcome, Row
from layerparity.settings.key import key


@dataclass(kw_only=True)
class EndLimits:
    """Limits of one's own on the numbers of the logits; null: none. A tolerance has them too."""

    kl_mean: float | None = key(None, "of logits: mean KL divergence in nats, below", least=0)
    kl_p99: float | None = key(None, "of logits: KL divergence of 99 % of the tokens", least=0)
    kl_max: float | None = key(None, "of logits: largest KL divergence, below", least=0)
    top1_agreement: float | None = key(
        None, "of logits: part of the tokens with the same likeliest one, above", least=0, most=1
    )
    top_5_error: float | None = key(None, "of logits: error of the 5 likeliest, below", least=0)
    top_50_error: float | None = key(None, "of logits: error of the 50 likeliest", least=0)
    top_1000_error: float | None = key(None, "of logits: error of the 1000 likeliest", least=0)
    top_all_error: float | None = key(None, "of logits: error of all, below", least=0)
    logp_mean: float | None = key(None, "of logits: mean change of log p in nats, below", least=0)
    logp_max: float | None = key(None, "of logits: largest change of log p, below", least=0)
    perplexity_ratio: float | None = key(
        None, "of logits: how far the ratio of the perplexities may be from 1", least=0
    )
    nmse: float | None = key(None, "of logits: normalised mean square error, below", least=0)

    def end_limits(self) -> dict[str, float]:
        """Return those that were given, by metric."""
        given = {each.name: getattr(self, each.name) for each in fields(EndLimits)}
        return {name: float(limit) for name, limit in given.items() if limit is not None}

    def end_breaches(self, metrics: Mapping[str, float]) -> list[Breach]:
        """Return the broken ones; sites that are no logits have no such numbers."""
        broken = []
        for name, limit in self.end_limits().items():
            value = metrics.get(name, limit if name in SIMILARITIES else 0.0)
            if name == "perplexity_ratio":
                holds = abs(metrics.get(name, 1.0) - 1.0) <= limit
            else:
                holds = value >= limit if name in SIMILARITIES else value <= limit
            broken += [] if holds else [Breach(name, value, limit)]
        return broken


class Tolerance(Protocol):
    """Limits on metrics. Never given a site that is judged by equality."""

    name: str

    @property
    def knows_rounding(self) -> bool:
        """Whether it knows how far rounding goes; one that does not may fail a right 16-bit run."""

    @property
    def knows_chains(self) -> bool:
        """Whether it knows what clean chains become; a right chain exceeds one that does not."""

    @property
    def closeness(self) -> Closeness:
        """Which elements are similar, for the metric that counts them."""

    def limits(self) -> dict[str, float]:
        """Return the limits by name, for the record."""

    def lacks(self, kind: Kind, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics hold nothing that this tolerance could judge by."""

    def breaches(self, kind: Kind, metrics: Mapping[str, float]) -> list[Breach]:
        """Return the broken limits; nothing where all hold."""


def refuse_limits_of_nothing(tolerance: Tolerance, rows: Iterable[Row]) -> None:
    """Raise UserError for limits on the logits where none were compared: a pass would be empty.

    An earlier comparison may hold logits, and not the number that a limit is on.
    """
    own = tolerance.end_limits() if isinstance(tolerance, EndLimits) else {}
    logits = [row for row in rows if row.site.is_logits]
    if own and not logits:
        raise UserError(
            f"tolerance.{next(iter(own))} judges logits, and what was compared holds none",
            "compare runs that hold lm_head (scope=full), or leave it out.",
        )
    unknown = [name for name in own if not any(name in row.metrics for row in logits)]
    if unknown and any(row.outcome is Outcome.PASS for row in logits):
        raise UserError(
            f"tolerance.{unknown[0]} judges a number that was not measured of these logits",
            "compare the runs again (job=compare), or leave it out.",
        )
