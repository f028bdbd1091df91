"""Numbers: what metrics are formulas of, summed over the elements of two tensors, mergeable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# A float32's upper 16 bits are sign, exponent and 7 bits of mantissa: a bin is 2^-7 wide at most.
DROPPED_BITS = 16
BINS = 1 << 15
# An element is similar where |c - g| <= ATOL + RTOL |g|: see similarity_percentage.
RTOL, ATOL = 1e-2, 1e-5


class Moments(NamedTuple):
    """Number, means, and sums of squared and crossed deviations from the means."""

    size: int = 0
    golden: float = 0.0
    candidate: float = 0.0
    gg: float = 0.0
    cc: float = 0.0
    gc: float = 0.0

    def merge(self, new: Moments) -> Moments:
        """Chan's update: both parts' own deviations, plus those between their means."""
        if not self.size or not new.size:
            return self if self.size else new
        count = self.size + new.size
        share = new.size / count
        g, c = new.golden - self.golden, new.candidate - self.candidate
        between = self.size * share
        return Moments(
            count,
            self.golden + g * share,
            self.candidate + c * share,
            self.gg + new.gg + g * g * between,
            self.cc + new.cc + c * c * between,
            self.gc + new.gc + g * c * between,
        )


@dataclass
class Numbers:
    """Over the pairs that are finite on both sides, d = candidate - golden; the rest is counted.

    Sums are float64. ``max_abs_diff`` and ``max_ulp`` are NaN where there is no pair. ``histogram``
    counts |d|, int64 [`BINS`], by the upper bits of its float32 pattern.
    """

    size: int = 0
    count: int = 0
    golden_squares: float = 0.0
    candidate_squares: float = 0.0
    diff_squares: float = 0.0
    golden_diff: float = 0.0
    abs_diff_sum: float = 0.0
    similar: int = 0
    nonfinite_disagreement: int = 0
    golden_nonfinite: int = 0
    max_abs_diff: float = float("nan")
    max_ulp: float = float("nan")
    moments: Moments = field(default_factory=Moments)
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))

    def merge(self, new: Numbers) -> None:
        """Take in the numbers of more elements."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(new, name))
        for name in ("max_abs_diff", "max_ulp"):
            setattr(self, name, larger(getattr(self, name), getattr(new, name)))
        self.moments = self.moments.merge(new.moments)
        self.histogram += new.histogram


_ADDED = (
    "size",
    "count",
    "golden_squares",
    "candidate_squares",
    "diff_squares",
    "golden_diff",
    "abs_diff_sum",
    "similar",
    "nonfinite_disagreement",
    "golden_nonfinite",
)


def larger(old: float, new: float) -> float:
    """Return the larger of two numbers, of which NaN is none."""
    return old if math.isnan(new) or old >= new else new
