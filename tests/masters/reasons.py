"""Reasons: the broken limits that the words of a failed row name."""

from __future__ import annotations

import re
from collections.abc import Mapping

Broken = list[str | float | int | None]

# What a reason says, the metric it is about, and its limit's name; none: any such value fails.
_SAID = (
    (r"error is .* times the noise floor", "error_ratio", "error_ratio"),
    (r"error at (\w+) (\d+) is .* times the noise floor", "error_ratio_{}", "error_ratio_{}"),
    (r"a factor is off by", "slope", "slope"),
    (r"a factor of (\w+) (\d+) is off by", "slope_{}", "slope"),
    (r"norm is off by", "norm_ratio", "norm_ratio"),
    (r"an offset of", "offset", "offset"),
    (r"\d+ of \d+ flips are no ties", "flips_outside_noise", ""),
    (r"expert sets differ at", "set_agreement", ""),
    (r"(?:an exact site: )?\d+ values are not equal to the bit", "unequal", ""),
    (r"\d+ values are NaN or Inf on one side only", "nonfinite_disagreement", ""),
    (r"(\w+) \S+ is not (?:under|over)", "{}", "{}"),
)


def broken_limits(
    reason: str, metrics: Mapping[str, float], limits: Mapping[str, float]
) -> list[Broken]:
    """Return [metric, value, limit, group] for each broken limit that a reason names.

    ``group`` is the head, channel, expert or position, None for the whole site; ``limit`` is None
    where any difference fails. A value that was not measured is None.
    """
    parts = (part for part in reason.split("; ") if part)
    return [found for part in parts if (found := _broken(part, metrics, limits)) is not None]


def _broken(part: str, metrics: Mapping[str, float], limits: Mapping[str, float]) -> Broken | None:
    for pattern, metric, limit in _SAID:
        said = re.match(pattern, part)
        if said is None:
            continue
        name, *group = said.groups() or ("",)
        held = metric.format(name)
        return [
            held,
            metrics.get(held),
            limits[limit.format(name)] if limit else None,
            int(group[0]) if group else None,
        ]
    return None
