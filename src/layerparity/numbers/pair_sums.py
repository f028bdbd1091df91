"""The sums over the elements of two tensors that metrics are formulas of, and their plain way.

`fused` computes the same in one compiled pass; here torch does, in float64 and piece by piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
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
# So few values are sorted sooner than the bins of all are looked through.
_FEW = 1 << 12
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
    ``histogram`` is int64 [2, bin]: which of `BINS` bins hold some |d|, by the upper bits of its
    float32 pattern, ascending, and how many each holds.
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
    histogram: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))

    def merge(self, new: PairSums) -> None:
        """Take in the sums of more elements."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(new, name))
        for name in ("max_abs_diff", "max_ulp"):
            setattr(self, name, larger(getattr(self, name), getattr(new, name)))
        self.moments = self.moments.merge(new.moments)
        self.histogram = added(self.histogram, new.histogram)


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
    # No comparison with NaN holds: an old one gives way as well.
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
            # What is merged with nothing stays as it is.
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
    row, other, g_row, c_row = (each.unsqueeze(0) for each in (golden, candidate, g, c))
    (of_finite,) = _of_rows(row, other, g_row, c_row, close=close)
    return replace(
        of_finite,
        size=sums.size,
        golden_nonfinite=sums.golden_nonfinite,
        nonfinite_disagreement=sums.nonfinite_disagreement,
    )


@one_thread()
def row_sums(
    golden: torch.Tensor, candidate: torch.Tensor, close: Closeness = CLOSE
) -> list[PairSums]:
    """Return the sums of each row of two [row, width] tensors of any dtypes, by itself.

    All values are finite. Rows are summed together: of short ones, an operation's call takes longer
    than the sum.
    """
    return _of_rows(golden, candidate, golden.double(), candidate.double(), close=close)


def _of_rows(
    golden: torch.Tensor,
    candidate: torch.Tensor,
    g: torch.Tensor,
    c: torch.Tensor,
    *,
    close: Closeness,
) -> list[PairSums]:
    """Return `row_sums` of tensors of which ``g`` and ``c`` are the float64 values."""
    d, width = c - g, g.shape[1]
    gap = d.abs()
    means = g.mean(1, keepdim=True), c.mean(1, keepdim=True)
    # Squares about the mean, and not those about zero less the mean's: nothing cancels.
    x, y = g - means[0], c - means[1]
    similar = gap <= c.abs().mul_(close.rtol).add_(close.atol)
    ulp = gap.new_full((len(g),), math.nan)
    if candidate.is_floating_point():
        ulp = most_steps(golden.to(candidate.dtype), candidate)
    sums = ((g, g), (c, c), (d, d), (g, d), (x, x), (y, y), (x, y))
    columns = (gap.sum(1), gap.amax(1), similar.sum(1), ulp, *(each[:, 0] for each in means))
    # One list of all numbers: each by itself would be another call of torch.
    table = torch.stack([*columns, *((left * right).sum(1) for left, right in sums)], 1).tolist()
    # Rounded to float32 first, so that |d| of every type falls into the same bins.
    bins = (gap.float().view(torch.int32) >> DROPPED_BITS).numpy()
    return [
        PairSums(
            size=width,
            count=width,
            abs_diff_sum=total,
            max_abs_diff=largest,
            similar=int(alike),
            max_ulp=steps,
            golden_squares=gg,
            candidate_squares=cc,
            diff_squares=dd,
            golden_diff=gd,
            moments=Moments(width, of_golden, of_candidate, xx, yy, xy),
            histogram=_counted(row),
        )
        for row, (
            total,
            largest,
            alike,
            steps,
            of_golden,
            of_candidate,
            gg,
            cc,
            dd,
            gd,
            xx,
            yy,
            xy,
        ) in zip(bins, table, strict=True)
    ]


def _counted(bins: np.ndarray) -> np.ndarray:
    """Return the histogram of bins, int32 [element]; see `PairSums`."""
    if bins.size <= _FEW:
        return np.stack(np.unique(bins, return_counts=True)).astype(np.int64)
    return filled(np.bincount(bins))


def filled(counts: np.ndarray) -> np.ndarray:
    """Return the histogram that all bins' counts are, int64 [bin]; see `PairSums`."""
    some = np.flatnonzero(counts)
    return np.stack([some, counts[some]])


def added(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return two histograms as one; see `PairSums`."""
    if not left.size or not right.size:
        return left if left.size else right
    bins, counts = np.concatenate([left, right], 1)
    some, where = np.unique(bins, return_inverse=True)
    # The counts pass through float64, which holds whole numbers up to 2^53.
    return np.stack([some, np.bincount(where, counts).astype(np.int64)])


def _class(value: torch.Tensor) -> torch.Tensor:
    """Return each float64's class: 0 finite, 1 +Inf, 2 -Inf, 3 NaN."""
    infinite = torch.isinf(value) * torch.where(value > 0, 1, 2)
    return torch.where(torch.isnan(value), 3, infinite)


def most_steps(golden: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return the most representable steps between two values of each row, float64 [...].

    Both tensors are of one float dtype, [..., width]. Bit patterns without their sign are ordered
    like the numbers (IEEE 754); +0 and -0 are one.
    """
    g, c = _ordered(golden), _ordered(candidate)
    gaps = torch.maximum(g, c) - torch.minimum(g, c)
    # Between the outermost numbers lie more steps than the integers of that size count.
    wide = gaps.double()
    return torch.where(gaps < 0, wide + 2.0 ** (8 * g.element_size()), wide).amax(-1)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return integers whose differences are steps: bits without sign, negated where it is set."""
    kind = _BITS[values.element_size()]
    bits = values.view(kind)
    sign = bits >> (8 * bits.element_size() - 1)
    # To flip all bits and add one negates, so that both zeros are 0.
    return (bits & torch.iinfo(kind).max).bitwise_xor_(sign).sub_(sign)
