"""Decide: how one site ends, and how all of them together do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from layerparity.anatomy.site import Kind
from layerparity.judge.tolerances.base import EndLimits, Tolerance
from layerparity.record.findings import Doubt, UnfinishedSweep
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import FAR_OFF, REPLICAS, Breach, Outcome, Row
from layerparity.record.weights import WeightFinding

_EMPTY = {
    "constant": ReasonKind.BOTH_CONSTANT,
    "repeated": ReasonKind.BOTH_REPEATED,
    "flat": ReasonKind.BOTH_FLAT,
}
# So many times the limit an error has to be that is held against the floor of a narrower type.
_BY_FAR = 4.0


def decide(
    kind: Kind,
    metrics: Mapping[str, float],
    tolerance: Tolerance,
    lacking: Reason | None = None,
) -> tuple[Outcome, tuple[Breach, ...], Reason | None]:
    """Return how a site ends, the limits it breaks, and why it could not be judged.

    ``lacking`` is why a tolerance may lack what it judges by: then the site is inconclusive, but
    for limits of one's own on the logits, which it may break all the same, and for an error that
    not even rounding to the golden's narrower type explains. Where it has metrics nevertheless,
    tokens that were routed apart are among them: they let it pass, and never fail.

    A constant, such as a buffer that was never written to, has nothing to be judged by, nor have
    tokens that all have the same numbers, or of one number each.
    Exact sites and masks are judged by equality, NaN and Inf by agreement, whatever the tolerance;
    replicas that disagree fail.
    """
    apart = _any(metrics, REPLICAS)
    if apart:
        return Outcome.FAIL, (*apart, *tolerance.breaches(kind, metrics)), None
    if kind in (Kind.EXACT, Kind.MASK):
        broken = _any(metrics, "unequal")
    else:
        broken = _any(metrics, "nonfinite_disagreement")
        if not broken:
            broken = tolerance.breaches(kind, metrics)
            excused = bool(broken) and lacking is not None and tolerance.knows_rounding
            if excused or tolerance.lacks(kind, metrics):
                # A limit on the logits needs no floor.
                own = tolerance.end_breaches(metrics) if isinstance(tolerance, EndLimits) else []
                own += _beyond_narrower(kind, metrics, tolerance)
                if own:
                    return Outcome.FAIL, tuple(own), None
                return Outcome.INCONCLUSIVE, (), lacking or Reason(ReasonKind.ROUNDING_UNKNOWN)
        sides = [
            [why for name, why in _EMPTY.items() if f"{side}_{name}" in metrics]
            for side in ("golden", "candidate")
        ]
        if not broken and all(sides):
            return Outcome.INCONCLUSIVE, (), Reason(sides[1][0])
    return (Outcome.FAIL if broken else Outcome.PASS), tuple(broken), None


def _beyond_narrower(
    kind: Kind, metrics: Mapping[str, float], tolerance: Tolerance
) -> list[Breach]:
    """Return that a site is further off than rounding to the golden's narrower type explains."""
    off = metrics.get(FAR_OFF, 0.0)
    broken = tolerance.breaches(kind, {"error_ratio": off / _BY_FAR})
    return [replace(each, value=off, limit=(each.limit or 0.0) * _BY_FAR) for each in broken]


def _any(metrics: Mapping[str, float], name: str) -> list[Breach]:
    count = metrics.get(name, 0.0)
    return [Breach(name, count)] if count else []


def outcome_of(
    rows: Sequence[Row], weights: Iterable[WeightFinding], doubts: Sequence[Doubt | UnfinishedSweep]
) -> Outcome:
    """Return how a comparison ends.

    A site that fails or a wrong weight decides; else what is missing, inconclusive or doubted, or
    wholly unjudged, leaves it inconclusive. What a stage was fed judges nothing: something it
    computed must have passed.
    """
    ends = {row.outcome for row in rows}
    if Outcome.FAIL in ends or any(each.is_fault for each in weights):
        return Outcome.FAIL
    computed = any(row.outcome is Outcome.PASS and row.site.end != "in" for row in rows)
    open_ = {Outcome.MISSING, Outcome.INCONCLUSIVE} & ends
    return Outcome.PASS if computed and not open_ and not doubts else Outcome.INCONCLUSIVE
