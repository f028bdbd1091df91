"""Percentage of elements that are similar: |c - g| <= atol + rtol |g|, as isclose means it.

The seeds name the metric and its limit (95 %) but no tolerance: 1 % of the golden's value, about
one step of bfloat16, and 1e-5 near zero (`_numbers.RTOL` and `ATOL`).
"""

from __future__ import annotations

from layerparity.numbers.metric import Additive


def percentage(similar: float, size: float) -> float:
    """Return 100 x similar / all; an element that is not finite is similar to none; NaN of none."""
    return 100.0 * similar / size if size else float("nan")


METRIC = Additive(("similar", "size"), percentage)
