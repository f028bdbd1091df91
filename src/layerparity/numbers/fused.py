"""The `PairSums` of two tensors in one pass of the compiled kernel, on all threads torch has.

Slices have a fixed size and are added up in order: the sums do not depend on how many threads
there are, nor on which of them was faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from layerparity.numbers import kernel
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.pair_sums import BINS, Moments, PairSums, filled, most_steps

# Pairs of a slice: long enough to hide what starting one costs, short enough to share them out.
_SLICE = 1 << 18
_WORDS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}
# Every float16 is a float32: it is made one, and the kernel needs no third type.
_EXACT = torch.float16
Result = TypeVar("Result")


def takes(golden: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Say whether the kernel can read both, of any shape: float32, bfloat16, float16 made wide."""
    return {golden.dtype, candidate.dtype} <= {*_WORDS, _EXACT}


def fused_sums(
    golden: torch.Tensor, candidate: torch.Tensor, close: Closeness = CLOSE
) -> tuple[PairSums, np.ndarray]:
    """Return what `pair_sums.plain_sums` returns, of two [row, width] tensors that it `takes`."""
    work = _Work.of(golden, candidate, close)
    histogram = _share_out(work)
    total = work.total(histogram)
    if total.count and candidate.dtype is _EXACT:
        # The kernel counts float32's steps.
        left, right = golden.reshape(-1), candidate.reshape(-1)
        finite = torch.isfinite(left) & torch.isfinite(right)
        total.max_ulp = float(most_steps(left[finite].to(_EXACT), right[finite]))
    return total, work.squares.reshape(2, golden.shape[0], -1).sum(-1)


class _Work(NamedTuple):
    """Two flat arrays of bits, and room for what each slice of them yields."""

    golden: np.ndarray
    candidate: np.ndarray
    width: int
    step: int
    sums: np.ndarray
    counts: np.ndarray
    squares: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, golden: torch.Tensor, candidate: torch.Tensor, close: Closeness) -> _Work:
        rows, width = golden.shape
        # A segment is of one row: the squares of a row are those of its segments.
        parts = -(-width // kernel.SEGMENT)
        step = max(1, _SLICE // min(width, kernel.SEGMENT))
        slices = -(-rows * parts // step)
        return cls(
            bits(golden),
            bits(candidate),
            width,
            step,
            np.zeros((slices, 12)),
            np.zeros((slices, 6), dtype=np.int64),
            np.zeros((2, rows * parts)),
            np.array([close.rtol, close.atol]),
        )

    def measure(self, index: int, histogram: np.ndarray) -> None:
        """Measure one slice, counting |d| in a thread's own histogram, int32 [4, BINS + ZEROS]."""
        first, last = index * self.step, min((index + 1) * self.step, self.squares.shape[1])
        # Steps are the candidate's own: a wider golden is rounded to its type first.
        rounded = self.golden.itemsize > self.candidate.itemsize
        layout = (self.width, first, last, rounded)
        room = (self.sums[index], self.counts[index], self.squares, histogram)
        kernel.measure(self.golden, self.candidate, layout, self.bounds, room)

    def total(self, histogram: np.ndarray) -> PairSums:
        """Add up what the slices yielded; ``histogram`` of |d| is int64 [`BINS`]."""
        sums, counts, moments = self.sums.sum(0), self.counts.sum(0), Moments()
        for each, count in zip(self.sums, self.counts[:, kernel.COUNT], strict=True):
            moments = moments.merge(Moments(int(count), *each[kernel.G_MEAN :].tolist()))
        pairs = PairSums(
            size=self.golden.size,
            count=int(counts[kernel.COUNT]),
            golden_squares=float(sums[kernel.GG]),
            candidate_squares=float(sums[kernel.CC]),
            diff_squares=float(sums[kernel.DD]),
            golden_diff=float(sums[kernel.GD]),
            abs_diff_sum=float(sums[kernel.ABS]),
            similar=int(counts[kernel.SIMILAR]),
            nonfinite_disagreement=int(counts[kernel.DISAGREE]),
            golden_nonfinite=int(counts[kernel.BROKEN]),
            moments=moments,
            histogram=filled(histogram),
        )
        if pairs.count:
            # Positive floats are ordered as their bits are, which a slot of whole numbers holds.
            most = self.counts.max(0)
            largest = most[kernel.LARGEST : kernel.LARGEST + 1].view(np.float64)
            pairs.max_abs_diff = float(largest[0])
            # The kernel counts in 32 bits, where a step of bfloat16 is 2^16.
            pairs.max_ulp = float(int(most[kernel.STEPS]) >> 32 - 8 * self.candidate.itemsize)
        return pairs


def _share_out(work: _Work) -> np.ndarray:
    """Measure all slices, each thread taking the next; return the histogram of |d|."""
    slices = len(work.sums)
    todo = itertools.count()

    def run() -> np.ndarray:
        # One for each thread: whole numbers add up to the same in any order, which floats do not.
        histogram = np.zeros((4, BINS + kernel.ZEROS), dtype=np.int32)
        # The interpreter's lock gives each number to one thread; the kernel runs without the lock.
        while (index := next(todo)) < slices:
            work.measure(index, histogram)
        counts: np.ndarray = histogram.sum(0, dtype=np.int64)
        # Equal pairs were counted in turn behind the last bin, and belong into the first.
        counts[0] += counts[BINS:].sum()
        return counts[:BINS]

    return sum(in_threads(run, slices), np.zeros(BINS, dtype=np.int64))


def in_threads(run: Callable[[], Result], most: int) -> list[Result]:
    """Return what ``run`` gives in each of the threads that torch has, of ``most`` at most."""
    threads = min(torch.get_num_threads(), most)
    if threads <= 1:
        return [run()]
    # The pool is of one size whatever is due: each other size would keep threads of its own.
    others = [_pool(torch.get_num_threads()).submit(run) for _ in range(threads - 1)]
    return [run(), *(each.result() for each in others)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="layerparity-metrics")


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's bits, flat: uint16 of bfloat16, uint32 of float32 and of float16 as such.

    ``tensor`` is of any shape.
    """
    wide = tensor.float() if tensor.dtype is _EXACT else tensor
    return wide.contiguous().reshape(-1).view(_WORDS[wide.dtype]).numpy()
