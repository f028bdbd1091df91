"""Say in words why a site ended as it did."""

from __future__ import annotations

import math

from layerparity.anatomy.site import Kind
from layerparity.record.verdict import Breach, Outcome, Row
from layerparity.report.measures import BY_NAME


def reason(row: Row) -> str:
    """Return why a site ended as it did; empty for one that passes."""
    if row.outcome is not Outcome.FAIL:
        return row.note
    broken = "; ".join(breach_text(each, row.metrics) for each in row.breaches)
    return f"an exact site: {broken}" if row.kind is Kind.EXACT else broken


def breach_text(breach: Breach, metrics: dict[str, float]) -> str:
    """Return which limit was broken and by how much; ``metrics`` are those of the site."""
    name, value = breach.metric, math.nan if breach.value is None else breach.value
    limit = breach.limit if breach.limit is not None else 0.0
    group = BY_NAME[name].group if name in BY_NAME else ""
    if name.startswith("error_ratio"):
        where = f" at {group} {breach.group}" if breach.group is not None else ""
        return f"error{where} is {value:.3g} times the noise floor (limit {limit:g})"
    if name.startswith("slope"):
        where = f" of {group} {breach.group}" if breach.group is not None else ""
        z = metrics.get(f"{name}_z", math.nan)
        return f"a factor{where} is off by {value:+.3%}, {z:.3g} standard errors"
    plain = {
        "norm_ratio": f"norm is off by {abs(value - 1.0):.2%}",
        "offset": f"an offset of {value:+.3g} noise floors, "
        f"{metrics.get('offset_z', math.nan):.3g} standard errors",
        "flips_outside_noise": f"{value:.0f} of {metrics.get('flips', 0.0):.0f} flips are no ties",
        "set_agreement": f"expert sets differ at {1.0 - value:.2%} of the tokens",
        "unequal": f"{value:.0f} values are not equal to the bit",
        "nonfinite_disagreement": f"{value:.0f} values are NaN or Inf on one side only",
    }
    if name in plain:
        return plain[name]
    if breach.is_under_floor:
        return f"{name} {value:.6g} is not over {limit:g}, {limit - value:.3g} short of it"
    times = f", {value / limit:.1f} times it" if limit else ""
    return f"{name} {value:.4g} is not under {limit:g}{times}"
