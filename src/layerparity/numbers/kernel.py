"""One compiled pass over two tensors that yields every sum, count and bin of `PairSums`.

Tensors are read as segments (a token's elements, or a part of them) that stay in a core's first
cache: summed in float64 lane by lane, and summed again without NaN and Inf where that shows any.
The next one comes from memory while this one's differences are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from layerparity.numbers.pair_sums import BINS

SEGMENT = 4096
# Slots of sums: squares and products of g, c and d = c - g, then a slice's means and moments.
GG, CC, DD, GD, ABS, SG, SC = range(7)
G_MEAN, C_MEAN, XX, YY, XY = range(7, 12)
# Equal pairs, often most of all, take turns in bins of their own: no count waits for the last one.
ZEROS = 64
# Slots of its counts; LARGEST holds the bits of the largest |d|, a float64.
COUNT, SIMILAR, DISAGREE, BROKEN, LARGEST, STEPS = range(6)
# Moments come from sums of squares that are at most this many times as large.
_MOST = 64

# Float32 bits without their sign: from these on a number is not finite, above them it is NaN.
_INF = np.uint32(0x7F800000)
_UNSIGNED = np.uint32(0x7FFFFFFF)
_TURN = np.uint16(ZEROS - 1)

_inner = numba.njit(nogil=True)


def kept_on_disk(function: Callable[..., Any]) -> Any:
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
    shift = 0 if word == numba.uint32 else 16

    def widened(word: Any) -> Any:
        return np.uint32(np.uint32(word) << np.uint32(shift))

    return widened


@_inner
def float_of(word: Any) -> Any:
    """Return the float32 that a word of bits stands for."""
    return np.uint32(wide(word)).view(np.float32)


@_inner
def _compact(golden: Any, candidate: Any, room: Any, counts: Any) -> Any:
    """Copy the pairs that are finite on both sides to ``room`` [2, n]; return how many they are."""
    kept = 0
    for i in range(golden.size):
        g, c = wide(golden[i]), wide(candidate[i])
        g_size, c_size = np.uint32(g & _UNSIGNED), np.uint32(c & _UNSIGNED)
        counts[BROKEN] += g_size >= _INF
        if g_size >= _INF or c_size >= _INF:
            # NaN has many patterns, and each Inf has one.
            agree = (g_size > _INF and c_size > _INF) or g == c
            counts[DISAGREE] += not agree
        else:
            room[0, kept], room[1, kept] = g, c
            kept += 1
    return kept


# Lanes may sum apart, in any fixed order; NaN and Inf keep their meaning.
_lanes = numba.njit(nogil=True, fastmath={"reassoc", "contract"})


@_lanes
def _sum(golden: Any, candidate: Any, bounds: Any, sums: Any, bins: Any) -> Any:
    """Sum a segment and write the bin of each |d|; return (similar pairs, bits of largest |d|).

    ``bounds`` are (rtol, atol).
    """
    rtol, atol = bounds[0], bounds[1]
    gg = cc = dd = gd = total = sg = sc = 0.0
    similar, largest = 0, np.int64(0)
    for i in range(golden.size):
        # float64's difference rounded to float32, in one step: 53 bits are 2 x 24 + 2 or more.
        narrow = np.float32(abs(float_of(candidate[i]) - float_of(golden[i])))
        g, c = np.float64(float_of(golden[i])), np.float64(float_of(candidate[i]))
        d = c - g
        gap = abs(d)
        gg += g * g
        cc += c * c
        dd += d * d
        gd += g * d
        total += gap
        sg += g
        sc += c
        similar += gap <= atol + rtol * abs(c)
        # Without a sign, bits are ordered as their numbers are.
        largest = max(largest, np.float64(gap).view(np.int64))
        upper = np.uint16(np.float32(narrow).view(np.uint32) >> np.uint32(16))
        bins[i] = upper if upper else np.uint16(np.uint16(BINS) + np.uint16(np.uint16(i) & _TURN))
    sums[GG], sums[CC], sums[DD], sums[GD], sums[ABS] = gg, cc, dd, gd, total
    sums[SG], sums[SC] = sg, sc
    return similar, largest


@_lanes
def _about(golden: Any, candidate: Any, sums: Any) -> None:
    """Write means and moments about them of a segment that hardly varies, from its first pair."""
    pivot, other = np.float64(float_of(golden[0])), np.float64(float_of(candidate[0]))
    sx = sy = xx = yy = xy = 0.0
    for i in range(golden.size):
        x, y = np.float64(float_of(golden[i])) - pivot, np.float64(float_of(candidate[i])) - other
        sx += x
        sy += y
        xx += x * x
        yy += y * y
        xy += x * y
    g, c = sx / golden.size, sy / golden.size
    sums[G_MEAN], sums[C_MEAN] = pivot + g, other + c
    sums[XX], sums[YY], sums[XY] = max(0.0, xx - sx * g), max(0.0, yy - sy * c), xy - sx * c


@_inner
def _moments(golden: Any, candidate: Any, sums: Any) -> None:
    """Write a segment's means and moments about them: from its sums, where those lose little.

    Six bits at most; else (hardly any variance, or a candidate near zero) by looking again.
    """
    gg, cc = sums[GG], sums[CC]
    g, c = sums[SG] / golden.size, sums[SC] / golden.size
    xx, yy = gg - sums[SG] * g, cc - sums[SC] * c
    # The last condition is for the product g c = g^2 + g d, which cancels where c is near zero.
    if _MOST * xx > gg and _MOST * yy > cc and _MOST * cc > gg:
        sums[G_MEAN], sums[C_MEAN] = g, c
        sums[XX], sums[YY], sums[XY] = xx, yy, gg + sums[GD] - sums[SG] * c
    else:
        _about(golden, candidate, sums)


@_inner
def _merge(sums: Any, before: Any, own: Any, size: Any) -> None:
    """Add a segment's sums to those of a slice's ``before`` pairs: see `Moments.merge`."""
    for slot in range(G_MEAN):
        sums[slot] += own[slot]
    share = size / (before + size)
    g, c = own[G_MEAN] - sums[G_MEAN], own[C_MEAN] - sums[C_MEAN]
    between = before * share
    sums[G_MEAN] += g * share
    sums[C_MEAN] += c * share
    sums[XX] += own[XX] + g * g * between
    sums[YY] += own[YY] + c * c * between
    sums[XY] += own[XY] + g * c * between


@_inner
def _round(bits: Any, room: Any) -> Any:
    """Return float32 bits rounded to bfloat16's, half to even."""
    for i in range(bits.size):
        word = wide(bits[i])
        # Half a unit less one, plus the last bit that stays: a tie carries only where that is odd.
        half = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        room[i] = np.uint32(word + half) & np.uint32(0xFFFF0000)
    return room[: bits.size]


def steps(golden: Any, candidate: Any) -> Any:
    """Return the most steps between two values of float32 bits; +0 and -0 are one."""
    raise TypeError("for compiled code only")


@overload(steps)
def _steps(golden: Any, candidate: Any) -> Any:
    # Two bfloat16 need not be widened, and as many more fit into a register: steps are 2^16 each.
    short = golden.dtype == candidate.dtype == numba.uint16
    signed, unsigned, dropped = (np.int16, np.uint16, 16) if short else (np.int32, np.uint32, 0)
    read, top = _inner(lambda word: word) if short else wide, 31 - dropped
    size = (1 << top) - 1

    def most_steps(golden: Any, candidate: Any) -> Any:
        most = unsigned(0)
        for i in range(golden.size):
            g, c = signed(read(golden[i])), signed(read(candidate[i]))
            g_sign, c_sign = signed(g >> top), signed(c >> top)
            # Sign and size become two's complement, in which both zeros are 0.
            g = signed(((g & size) ^ g_sign) - g_sign)
            c = signed(((c & size) ^ c_sign) - c_sign)
            # Unsigned: the outermost numbers are more steps apart than a signed word holds.
            most = max(most, unsigned(unsigned(max(g, c)) - unsigned(min(g, c))))
        return np.int64(most) << dropped

    return most_steps


@_inner
def _tally(bins: Any, histogram: Any, golden: Any, candidate: Any, ahead: Any) -> None:
    """Count bins, in turn into four histograms: equal neighbours need not wait for each other.

    The pairs from ``ahead`` on come into the cache meanwhile.
    """
    one, two, three, four = histogram[0], histogram[1], histogram[2], histogram[3]
    most = np.uint64(0xFFFF)
    words = bins[: bins.size // 4 * 4].view(np.uint64)
    for i in range(words.size):
        # Four words of bins are sixteen pairs: a cache line of float32.
        if i & 3 == 0:
            fetch(golden, ahead + 4 * i)
            fetch(candidate, ahead + 4 * i)
        word = words[i]
        one[word & most] += 1
        two[(word >> np.uint64(16)) & most] += 1
        three[(word >> np.uint64(32)) & most] += 1
        four[word >> np.uint64(48)] += 1
    for i in range(4 * words.size, bins.size):
        one[bins[i]] += 1


@kept_on_disk
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
        similar, largest = _sum(g, c, bounds, own, bins)
        size, squares[1, segment] = g.size, own[DD]
        # NaN or Inf on either side shows in d^2, and no finite float32 overflows in float64.
        if np.isfinite(own[DD]):
            _moments(g, c, own)
            most = steps(_round(g, kept[0]), c) if rounded else steps(g, c)
        else:
            squares[1, segment] = np.inf
            size = _compact(g, c, kept, counts)
            left, right = kept[0, :size], kept[1, :size]
            similar, largest = _sum(left, right, bounds, own, bins)
            if size:
                _moments(left, right, own)
            most = steps(_round(left, left) if rounded else left, right)
        squares[0, segment] = own[GG]
        _tally(bins[:size], histogram, golden, candidate, stop)
        if size:
            _merge(sums, counts[COUNT], own, size)
        counts[COUNT] += size
        counts[SIMILAR] += similar
        counts[LARGEST] = max(counts[LARGEST], largest)
        counts[STEPS] = max(counts[STEPS], most)


# LLVM's "prefetch" takes: read, to be kept in every cache, data (not code).
_HOW = (0, 3, 1)


def _fetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for the line of ``array[index]``; an index past the end is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = make_array(array)(context, builder, args[0]).data
        number = ir.IntType(32)
        place = builder.bitcast(builder.gep(start, [args[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(ask, [place, *(number(each) for each in _HOW)])
        return context.get_dummy_value()

    return types.void(array, index), generate


# Called without the context, as in `fetch(array, index)`, which no annotation says.
fetch: Any = intrinsic(_fetch)
