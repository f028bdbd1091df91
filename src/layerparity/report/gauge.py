"""Gauge: the number that a site is judged by, beside its limit, as tables and figures show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from layerparity.anatomy.site import Kind
from layerparity.ground.numeral import numeral
from layerparity.record.verdict import Breach, Outcome, Row, Verdict
from layerparity.report.measure import Measure
from layerparity.report.measures import BY_NAME, REL_L2

R = BY_NAME["error_ratio"]
# What sets are judged by: a count or a share, but no size of an error.
_SETS = ("flips_outside_noise", "set_agreement")
Limits = Mapping[str, float]


@dataclass(frozen=True)
class Gauge:
    """A site's ``value`` of a ``measure``, and the ``limit`` that judges it; None where none does.

    ``group`` is the head, channel, expert or position that the value is of.
    """

    measure: Measure
    value: float
    limit: float | None = None
    group: int | None = None

    @classmethod
    def of(cls, breach: Breach) -> Gauge:
        """Return the gauge of a limit that was broken."""
        value = math.nan if breach.value is None else breach.value
        measure = BY_NAME.get(breach.metric) or Measure(breach.metric, breach.metric, "")
        limit = measure.ideal if breach.limit is None else breach.limit
        return cls(measure, value, limit, breach.group)

    @property
    def share(self) -> float:
        """How much of what the limit allows the error takes: 1 at the limit, NaN as infinite."""
        error = self.measure.badness(self.value)
        allowed = 0.0 if self.limit is None else self.measure.allowed(self.limit)
        if math.isnan(error):
            return math.inf
        if allowed > 0:
            return error / allowed
        return math.inf if error else 0.0

    @property
    def is_error(self) -> bool:
        """Whether it is the size of an error, which one of sets is not."""
        return self.measure.name not in _SETS

    @property
    def value_text(self) -> str:
        """The value alone: ``R 0.52``."""
        return f"{self.measure.label} {self.measure.show(self.value)}"

    @property
    def text(self) -> str:
        """The value with its limit: ``R 0.52 of 2``, ``Pearson 0.9, above 0.99``."""
        where = "" if self.group is None else f" ({self.measure.group} {self.group})"
        if not self.limit or self.limit == self.measure.ideal:
            return self.value_text + where
        if self.measure.bound in ("above", "within"):
            return f"{self.value_text}, {self.measure.side(self.limit)}{where}"
        return f"{self.value_text} of {numeral(self.limit)}{where}"


def gauge(row: Row, limits: Limits) -> Gauge | None:
    """Return what a site is judged by; None where it has no number of that kind.

    That is R where it is judged by R, the first limit that it broke where it broke others only,
    else the metric that is nearest to its limit. Where nothing judges it, it is the relative L2
    error.
    """
    found = [Gauge.of(each) for each in row.breaches]
    if found:
        return next((each for each in found if each.measure is R), found[0])
    if row.kind is Kind.REAL:
        # R is what the others of its tolerance only add to: without it, nothing was judged.
        judging = (R.name,) if R.name in limits else filter(_alone, limits)
        held = [name for name in judging if name in row.metrics]
        found = [Gauge(BY_NAME[name], row.metrics[name], limits[name]) for name in held]
        if not found and REL_L2.name in row.metrics:
            return Gauge(REL_L2, row.metrics[REL_L2.name])
    else:
        agreed = row.metrics.get("set_agreement", 1.0) == 1.0
        names = ("unequal", *(reversed(_SETS) if agreed else _SETS))
        found = [
            Gauge(BY_NAME[n], row.metrics[n], BY_NAME[n].ideal) for n in names if n in row.metrics
        ]
        return found[0] if found else None
    # What a float64 rounds off in a correlation of equal tensors is no error.
    return max(found, key=lambda each: round(each.share, 9), default=None)


def _alone(name: str) -> bool:
    """Say whether a metric decides by itself, and not together with another one."""
    return name in BY_NAME and BY_NAME[name].bound != "jointly"


def gauge_text(row: Row, limits: Limits) -> str:
    """Return a row's gauge as a cell of a table; a dash where it has none."""
    found = gauge(row, limits)
    return "-" if found is None else found.text


# What a stranger has to know of a gauge before he can read it.
_R_MEANS = (
    "R is the error in noise floors. A noise floor is the largest rounding error of correct "
    "computations of the same block."
)
_FLIPS_MEAN = (
    "A flip is a token that chose other experts than in the golden; it is no tie where rounding "
    "cannot have done it."
)


def gauge_meaning(row: Row, limits: Limits) -> str:
    """Return what a row's gauge is, for one who reads his first report; empty where it has none."""
    found = gauge(row, limits)
    if found is None:
        return ""
    if found.measure.name.startswith(R.name):
        return _R_MEANS
    return _FLIPS_MEAN if found.measure.name == _SETS[0] else found.measure.meaning


def severity(row: Row, limits: Limits) -> tuple[bool, float, float]:
    """Return what orders rows that ended alike: by how much of their limit they take.

    What has no size of an error comes first, then what nothing judges, by its relative L2 error.
    """
    found, error = gauge(row, limits), row.metrics.get(REL_L2.name, -1.0)
    judged = found is not None and found.limit is not None
    share = found.share if found is not None and judged else -1.0
    is_error = found is not None and found.is_error
    return is_error, round(share, 9), math.inf if math.isnan(error) else error


def nearest_to_limit(rows: Sequence[Row], limits: Limits) -> Row | None:
    """Return the row whose error takes most of its limit, or None where there is no error at all.

    Where nothing judges any, it is the row of the largest relative L2 error.
    """
    severities = [(severity(row, limits), row) for row in rows]
    measured = [each for each in severities if max(each[0][1:]) > 0]
    return max(measured, key=itemgetter(0))[1] if measured else None


@dataclass(frozen=True)
class Ordinate:
    """What a figure of errors by layer shows upwards: its label, title, words and limit."""

    label: str
    title: str
    words: str
    limit: float | None

    @classmethod
    def of(cls, verdict: Verdict) -> Ordinate:
        """Return what a verdict is judged by: R, shares of several limits, else a plain error."""
        if R.name in verdict.limits and any(R.name in row.metrics for row in verdict.rows):
            words = "R of each site, its error over the noise floor, on a logarithmic axis."
            return cls(R.label, "R by layer", words, verdict.limits[R.name])
        judging = {name for name in verdict.limits if _alone(name)}
        if any(judging & row.metrics.keys() for row in verdict.rows):
            words = "Of each site, how much of its limit the metric nearest to it takes: 1 is the "
            return cls("of limit", "Errors over their limits by layer", f"{words}limit.", 1.0)
        words = "Relative L2 error of each site against the golden, which nothing judges here."
        return cls(REL_L2.label, "Relative L2 error by layer", words, None)

    def value(self, row: Row, limits: Limits) -> float | None:
        """Return a row's value; infinite where it fails without a size of its error."""
        broken = row.outcome is Outcome.FAIL and row.kind is not Kind.INDEX_SET
        if self.label == "of limit":
            found = gauge(row, limits)
            judged = found is not None and found.is_error and found.limit is not None
            return found.share if found is not None and judged else None
        name = R.name if self.label == R.label else REL_L2.name
        return row.metrics.get(name, math.inf if broken else None)
