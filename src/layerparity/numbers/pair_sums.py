"""The sums over the elements of two tensors that metrics are formulas of, and their plain way.

`fused` computes the same in one compiled pass; here torch does, in float64 and piece by piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.closeness import CLOSE, Closeness

# A float32's upper 16 bits are sign, exponent and 7 bits of mantissa: a bin is 2^-7 wide at most.
DROPPED_BITS = 16
BINS = 1 << 15
# Elements of a piece: its float64 intermediates stay in a core's cache and within malloc's reuse,
# which makes a pass three times and more faster than with a million.
_SIZE = 1 << 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Moments(NamedTuple):
    """Number, means, and sums of squared and crossed deviations from the means."""

    size: int = 0
    golden: float = 0.0
    candidate: float = 0.0
    gg: float = 0.0
    cc: float = 0.0
    gc: float = 0.0

    def merge(self, new: Moments) -> Moments:
        """Return the moments of both parts: their own deviations, plus those between their means.

        Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm".
        """
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
class PairSums:
    """Sums over the pairs that are finite on both sides, float64, with d = candidate - golden.

    The other pairs are counted. ``max_abs_diff`` and ``max_ulp`` are NaN where there is no pair.
    ``histogram`` counts |d|, int64 [`BINS`], by the upper bits of its float32 pattern.
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

    def merge(self, new: PairSums) -> None:
        """Take in the sums of more elements."""
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


@one_thread()
def plain_sums(
    golden: torch.Tensor, candidate: torch.Tensor, close: Closeness = CLOSE
) -> tuple[PairSums, np.ndarray]:
    """Return the sums of two [row, width] tensors of any dtypes, and float64 [2, row] of squares.

    ``close`` says which elements are similar. The squares are of the golden and of the difference
    in each row, over its finite pairs; the difference's is Inf in a row with any other.
    """
    total, (height, width) = PairSums(), golden.shape
    squares = np.zeros((2, height))
    # Pieces of about `_SIZE` elements cover all.
    tall = max(1, _SIZE // max(1, width))
    corners = product(range(0, height, tall), range(0, width, _SIZE))
    for row, column in corners:
        rows, columns = slice(row, row + tall), slice(column, column + _SIZE)
        left, right = golden[rows, columns], candidate[rows, columns]
        g, c = left.double(), right.double()
        d_squares = (c - g).square().sum(1)
        broken = ~torch.isfinite(d_squares)
        whole = g if not broken.any() else torch.where(torch.isfinite(g) & torch.isfinite(c), g, 0)
        squares[0, rows] += whole.square().sum(1).numpy()
        squares[1, rows] += torch.where(broken, math.inf, d_squares).numpy()
        wide = (g.reshape(-1), c.reshape(-1))
        flat = left.reshape(-1), right.reshape(-1)
        piece = _piece(*flat, *wide, broken=bool(broken.any()), close=close)
        if left.numel() == golden.numel():
            # To add up histograms takes as long as all else of a small site.
            return piece, squares
        total.merge(piece)
    return total, squares


def _piece(
    golden: torch.Tensor,
    candidate: torch.Tensor,
    g: torch.Tensor,
    c: torch.Tensor,
    *,
    broken: bool,
    close: Closeness,
) -> PairSums:
    """Return the sums of flat tensors, of which ``g`` and ``c`` are the float64 values.

    ``broken`` says that some of them are not finite.
    """
    sums = PairSums(size=golden.numel())
    if broken:
        finite = torch.isfinite(g) & torch.isfinite(c)
        sums.golden_nonfinite = int(torch.count_nonzero(~torch.isfinite(g)))
        sums.nonfinite_disagreement = int(torch.count_nonzero(_class(g) != _class(c)))
        golden, candidate, g, c = golden[finite], candidate[finite], g[finite], c[finite]
    if not golden.numel():
        return sums
    if candidate.is_floating_point():
        sums.max_ulp = most_steps(golden.to(candidate.dtype), candidate)
    d = c - g
    gap = d.abs()
    sums.count = g.numel()
    sums.golden_squares, sums.candidate_squares = _dot(g, g), _dot(c, c)
    sums.diff_squares, sums.golden_diff = _dot(d, d), _dot(g, d)
    sums.abs_diff_sum, sums.max_abs_diff = float(gap.sum()), float(gap.max())
    sums.similar = int(torch.count_nonzero(gap <= c.abs().mul_(close.rtol).add_(close.atol)))
    bins = gap.float().view(torch.int32) >> DROPPED_BITS
    sums.histogram = torch.bincount(bins, minlength=BINS).numpy()
    means = float(g.mean()), float(c.mean())
    x, y = g - means[0], c - means[1]
    sums.moments = Moments(sums.count, *means, _dot(x, x), _dot(y, y), _dot(x, y))
    return sums


def _dot(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.dot(left, right))


def _class(value: torch.Tensor) -> torch.Tensor:
    """Return each float64's class: 0 finite, 1 +Inf, 2 -Inf, 3 NaN."""
    infinite = torch.isinf(value) * torch.where(value > 0, 1, 2)
    return torch.where(torch.isnan(value), 3, infinite)


def most_steps(golden: torch.Tensor, candidate: torch.Tensor) -> float:
    """Return the most representable steps between two values of flat tensors of one float dtype.

    Bit patterns without their sign are ordered like the numbers (IEEE 754); +0 and -0 are one.
    """
    g, c = _ordered(golden), _ordered(candidate)
    gaps = torch.maximum(g, c) - torch.minimum(g, c)
    wrapped = gaps < 0 if float(gaps.min()) < 0 else None
    if wrapped is None:
        return float(gaps.max())
    return float(gaps[wrapped].max()) + 2.0 ** (8 * g.element_size())


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return integers whose differences are steps: bits without sign, negated where it is set."""
    kind = _BITS[values.element_size()]
    bits = values.view(kind)
    sign = bits >> (8 * bits.element_size() - 1)
    return (bits & torch.iinfo(kind).max).bitwise_xor_(sign).sub_(sign)
