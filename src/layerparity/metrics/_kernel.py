"""Kernel: one compiled pass over two tensors that yields every sum, count and bin of `Numbers`.

Tensors are read as segments (a token's elements, or a part of them) that stay in a core's first
cache: summed in float64 lane by lane, and summed again without NaN and Inf where that shows any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from layerparity.metrics._numbers import BINS

SEGMENT = 4096
# Slots of a slice's sums: squares and products of g, c, d and of the deviations x, y from pivots.
GG, CC, DD, GD, ABS, SX, SY, XX, YY, XY, GOLDEN_PIVOT, CANDIDATE_PIVOT = range(12)
_ADDED = 10
# Equal pairs, often most of all, take turns in bins of their own: no count waits for the last one.
ZEROS = 64
# Slots of its counts; LARGEST holds the bits of the largest |d|, a float64.
COUNT, SIMILAR, DISAGREE, BROKEN, LARGEST, STEPS = range(6)

_INF = np.uint32(0x7F800000)
_UNSIGNED = np.uint32(0x7FFFFFFF)


_inner = numba.njit(nogil=True)


def _kept_on_disk(function: Callable[..., Any]) -> Any:
    """Compile a function once per machine: beside this file, or in the user's cache folder."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # Neither folder can be written: each process compiles anew.
        return _inner(function)


def wide(word: Any) -> Any:
    """Return a value's float32 bits: the word itself, or bfloat16's widened."""
    raise TypeError("for compiled code only")


@overload(wide)
def _wide(word: Any) -> Any:
    def same(word: Any) -> Any:
        return word

    def widened(word: Any) -> Any:
        return np.uint32(np.uint32(word) << np.uint32(16))

    return same if word == numba.uint32 else widened


def readable(words: Any) -> Any:
    """Return words that `value` reads: float32's as floats, bfloat16's as they are."""
    raise TypeError("for compiled code only")


@overload(readable)
def _readable(words: Any) -> Any:
    def floats(words: Any) -> Any:
        return words.view(np.float32)

    def same(words: Any) -> Any:
        return words

    return floats if words.dtype == numba.uint32 else same


def value(word: Any) -> Any:
    """Return the float32 that a `readable` word stands for."""
    raise TypeError("for compiled code only")


@overload(value)
def _value(word: Any) -> Any:
    def same(word: Any) -> Any:
        return word

    def widened(word: Any) -> Any:
        return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)

    return same if word == numba.float32 else widened


@_inner
def _compact(golden: Any, candidate: Any, room: Any, counts: Any) -> Any:
    """Copy the pairs that are finite on both sides to ``room`` [2, n]; return how many they are."""
    kept = 0
    for i in range(golden.size):
        g, c = wide(golden[i]), wide(candidate[i])
        g_size, c_size = np.uint32(g & _UNSIGNED), np.uint32(c & _UNSIGNED)
        counts[BROKEN] += g_size >= _INF
        if g_size >= _INF or c_size >= _INF:
            agree = (g_size > _INF and c_size > _INF) or g == c
            counts[DISAGREE] += not agree
        else:
            room[0, kept], room[1, kept] = g, c
            kept += 1
    return kept


# Lanes may sum apart, in any fixed order; NaN and Inf keep their meaning.
@numba.njit(nogil=True, fastmath={"reassoc", "contract"})
def _sum(golden: Any, candidate: Any, bounds: Any, sums: Any, bins: Any) -> Any:
    """Sum a segment and write the bin of each |d|; return (similar pairs, bits of largest |d|).

    ``bounds`` are (rtol, atol); ``sums`` holds the pivots and gets the rest.
    """
    pivot, other, rtol, atol = sums[GOLDEN_PIVOT], sums[CANDIDATE_PIVOT], bounds[0], bounds[1]
    gg = cc = dd = gd = total = sx = sy = xx = yy = xy = 0.0
    similar, largest = 0, np.int64(0)
    for i in range(golden.size):
        g, c = np.float64(value(golden[i])), np.float64(value(candidate[i]))
        d = c - g
        gap = abs(d)
        x, y = g - pivot, c - other
        gg += g * g
        cc += c * c
        dd += d * d
        gd += g * d
        total += gap
        sx += x
        sy += y
        xx += x * x
        yy += y * y
        xy += x * y
        similar += gap <= atol + rtol * abs(g)
        largest = max(largest, np.float64(gap).view(np.int64))
        upper = np.float32(gap).view(np.uint32) >> np.uint32(16)
        bins[i] = upper if upper else np.uint32(BINS + i % ZEROS)
    sums[GG], sums[CC], sums[DD], sums[GD], sums[ABS] = gg, cc, dd, gd, total
    sums[SX], sums[SY], sums[XX], sums[YY], sums[XY] = sx, sy, xx, yy, xy
    return similar, largest


@_inner
def _round(bits: Any, room: Any) -> Any:
    """Return float32 bits rounded to bfloat16's, half to even."""
    for i in range(bits.size):
        word = wide(bits[i])
        half = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        room[i] = np.uint32(word + half) & np.uint32(0xFFFF0000)
    return room[: bits.size]


@_inner
def _steps(golden: Any, candidate: Any) -> Any:
    """Return the most steps between two values of float32 bits; +0 and -0 are one."""
    most = np.uint32(0)
    for i in range(golden.size):
        g, c = np.int32(wide(golden[i])), np.int32(wide(candidate[i]))
        g_sign, c_sign = g >> 31, c >> 31
        g = np.int32(((g & 0x7FFFFFFF) ^ g_sign) - g_sign)
        c = np.int32(((c & 0x7FFFFFFF) ^ c_sign) - c_sign)
        most = max(most, np.uint32(np.uint32(max(g, c)) - np.uint32(min(g, c))))
    return np.int64(most)


@_inner
def _tally(bins: Any, histogram: Any) -> None:
    """Count bins, in turn into four histograms: equal neighbours need not wait for each other."""
    one, two, three, four = histogram[0], histogram[1], histogram[2], histogram[3]
    most = np.uint64(0xFFFF)
    whole = bins.size // 4 * 4
    for word in bins[:whole].view(np.uint64):
        one[word & most] += 1
        two[(word >> np.uint64(16)) & most] += 1
        three[(word >> np.uint64(32)) & most] += 1
        four[word >> np.uint64(48)] += 1
    for i in range(whole, bins.size):
        one[bins[i]] += 1


@_kept_on_disk
def measure(golden: Any, candidate: Any, layout: Any, bounds: Any, found: Any) -> None:
    """Measure a slice of two flat arrays of bits, uint32 for float32 and uint16 for bfloat16.

    ``layout`` is (width of a row, first segment, last segment + 1, whether the golden is rounded to
    bfloat16 before steps are counted); ``bounds`` are (rtol, atol). ``found`` is filled: (sums
    float64 [12], counts int64 [6], squares float64 [2, segments of the tensor]: sums of g^2 and of
    d^2, histogram int32 [4, BINS + ZEROS] of |d|).
    """
    width, first, last, rounded = layout
    sums, counts, squares, histogram = found
    parts = (width + SEGMENT - 1) // SEGMENT
    kept = np.empty((2, SEGMENT), np.uint32)
    bins = np.empty(SEGMENT, np.uint16)
    own = np.zeros(12)
    for segment in range(first, last):
        column = segment % parts * SEGMENT
        start = segment // parts * width + column
        stop = start + min(SEGMENT, width - column)
        g, c = golden[start:stop], candidate[start:stop]
        x, y = readable(g), readable(c)
        if counts[COUNT] == 0:
            # Deviations from any one pair lose little: at worst a slice's number of pairs x 1e-16.
            own[GOLDEN_PIVOT], own[CANDIDATE_PIVOT] = value(x[0]), value(y[0])
        # Widened as they are summed: the next words arrive from memory in the meantime.
        similar, largest = _sum(x, y, bounds, own, bins)
        size, squares[1, segment] = g.size, own[DD]
        if np.isfinite(own[DD]):
            most = _steps(_round(g, kept[0]), c) if rounded else _steps(g, c)
        else:
            squares[1, segment] = np.inf
            size = _compact(g, c, kept, counts)
            left, right = kept[0, :size], kept[1, :size]
            values = kept[:, :size].view(np.float32)
            if counts[COUNT] == 0 and size:
                own[GOLDEN_PIVOT], own[CANDIDATE_PIVOT] = values[0, 0], values[1, 0]
            similar, largest = _sum(values[0], values[1], bounds, own, bins)
            most = _steps(_round(left, left) if rounded else left, right)
        squares[0, segment] = own[GG]
        _tally(bins[:size], histogram)
        for slot in range(_ADDED):
            sums[slot] += own[slot]
        counts[COUNT] += size
        counts[SIMILAR] += similar
        counts[LARGEST] = max(counts[LARGEST], largest)
        counts[STEPS] = max(counts[STEPS], most)
    sums[GOLDEN_PIVOT], sums[CANDIDATE_PIVOT] = own[GOLDEN_PIVOT], own[CANDIDATE_PIVOT]
