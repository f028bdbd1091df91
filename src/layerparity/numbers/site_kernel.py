"""One compiled pass over a site's candidate, golden and reference: every sum of `SiteSums`.

A task is some columns of some rows: the columns' own sums stay in a core's first cache while row
after row is read.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from layerparity.numbers.kernel import float_of, kept_on_disk

# Columns that are summed at once, at most: their seven sums fill a first cache by half.
COLUMNS = 512

_inner = numba.njit(nogil=True)
# As in `kernel`: lanes may sum apart, in any fixed order; NaN and Inf keep their meaning.
_lanes = numba.njit(nogil=True, fastmath={"reassoc", "contract"})
# An index without a sign needs no look at where it wraps around.
_at = np.uint64
_1, _2, _3, _4, _5, _6 = (np.uint64(slot * COLUMNS) for slot in range(1, 7))


def value(word: Any) -> Any:
    """Return a word's float64: of float32's or bfloat16's bits, or of a float."""
    raise TypeError("for compiled code only")


@overload(value)
def _value(word: Any) -> Any:
    read = _inner(lambda word: word) if isinstance(word, numba.types.Float) else float_of

    def widened(word: Any) -> Any:
        return np.float64(read(word))

    return widened


@_lanes
def _row(sides: Any, factors: Any, part: Any, size: Any, own: Any) -> Any:
    """Sum a part of a row; return the row's five sums, and the part's three.

    ``part`` says where it begins: in the tensors, in the row, and in ``own``, float64 [7 *
    COLUMNS], to which the columns' sums are added: of e^2, d, d r, r^2 and the products of the last
    two, with e = candidate - reference, d = candidate - golden, r = reference. The row's are of
    e^2, r^2, w e^2, (golden - reference)^2 and s d, for scales s and w = s^2; the part's of w d r,
    w r^2 and w e r.
    """
    candidate, golden, reference = sides
    scales, weights = factors
    squared = square = weighed = owned = offset = products = squares = shared = 0.0
    first, before, room = _at(part[0]), _at(part[1]), _at(part[2])
    for each in range(size):
        i = _at(each)
        c, g, r = value(candidate[first + i]), value(golden[first + i]), value(reference[first + i])
        d, e, o = c - g, c - r, g - r
        p, q, error = d * r, r * r, e * e
        at = room + i
        own[at] += error
        own[at + _1] += d
        own[at + _2] += p
        own[at + _3] += q
        own[at + _4] += p * p
        own[at + _5] += p * q
        own[at + _6] += q * q
        weight = weights[before + i]
        squared += error
        square += q
        weighed += weight * error
        owned += o * o
        offset += scales[before + i] * d
        products += weight * p
        squares += weight * q
        shared += weight * (e * r)
    return squared, square, weighed, owned, offset, products, squares, shared


@kept_on_disk
def measure(sides: Any, factors: Any, task: Any, found: Any) -> None:
    """Measure the columns of some parts of some rows of three flat arrays.

    ``sides`` are candidate and golden, bits as in `kernel.measure`, and reference, float32 or
    float64; ``factors`` are scales and their squares, float64 [width]. ``task`` is (first row, last
    row + 1, where each part begins and the last one ends, int64 [parts + 1], number of the first).
    ``found`` is filled: (float64 [7, width], float64 [row, 5], float64 [3, row, part of the site]).
    """
    first, last, cuts, part = task
    columns, rows, parts = found
    width, own = factors[0].size, np.zeros(7 * COLUMNS)
    begin = 0
    while begin < cuts.size - 1:
        end, start = begin + 1, cuts[begin]
        # Neighbouring parts share a reading of the rows as long as their columns' sums fit.
        while end < cuts.size - 1 and cuts[end + 1] - start <= COLUMNS:
            end += 1
        own[:] = 0
        for row in range(first, last):
            for piece in range(begin, end):
                column = cuts[piece]
                where = (row * width + column, column, column - start)
                sums = _row(sides, factors, where, cuts[piece + 1] - column, own)
                # No other task adds to this row of this block: its parts are added in their order.
                for slot in range(5):
                    rows[row, slot] += sums[slot]
                for slot in range(3):
                    parts[slot, row, part + piece] = sums[5 + slot]
        size = cuts[end] - start
        for slot in range(7):
            columns[slot, start : start + size] = own[slot * COLUMNS : slot * COLUMNS + size]
        begin = end


@_lanes
def _regress(sides: Any, start: Any, size: Any, products: Any, squares: Any) -> None:
    """Add a part of a row's d r and r^2 to ``products`` and ``squares``, float64 [COLUMNS]."""
    candidate, golden, reference = sides
    first = _at(start)
    for each in range(size):
        i = _at(each)
        r = value(reference[first + i])
        products[i] += (value(candidate[first + i]) - value(golden[first + i])) * r
        squares[i] += r * r


@_lanes
def _left(products: Any, squares: Any, slope: Any, weights: Any) -> Any:
    """Return the sum of the squares of (P - slope Q) w; all are float64 [columns]."""
    total = 0.0
    for i in range(weights.size):
        # Weights are the columns' own: it is enough to put them on sums over all rows.
        left = (products[i] - slope * squares[i]) * weights[i]
        total += left * left
    return total


@kept_on_disk
def apart(sides: Any, weights: Any, rows: Any, slope: Any) -> Any:
    """Return the sum over columns of (P - slope Q)^2, P and Q being weighed sums over ``rows``.

    ``sides`` are those of `measure`, ``weights`` float64 [width], ``rows`` int64 [rows].
    """
    width, total = weights.size, 0.0
    for start in range(0, width, COLUMNS):
        size = min(COLUMNS, width - start)
        products, squares = np.zeros(COLUMNS), np.zeros(COLUMNS)
        for row in rows:
            _regress(sides, row * width + start, size, products, squares)
        total += _left(products, squares, slope, weights[start : start + size])
    return total
