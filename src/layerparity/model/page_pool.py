"""Hand out memory for weights, and use the pages of dropped ones again.

Touching a fresh page costs several times what copying into a used one does, and the C library's
own allocator keeps blocks of up to 32 MB for later, which a stream of weights would turn into a
heap far larger than what it holds.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

# Bytes from which a tensor gets pages of its own.
_LARGE = 1 << 18


class PagePool:
    """Hands out contiguous CPU tensors, and takes their pages back when nobody holds them.

    Together, what is in use and what waits never exceed what was once in use: memory stays within
    the largest set of tensors that were alive at one time. ``largest`` is the most bytes that were
    asked for at once.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._free: list[mmap.mmap] = []
        # Filled by the garbage collector, which may run anywhere: nothing is locked there.
        self._dropped: deque[mmap.mmap] = deque()
        self._used = self._most = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU tensor of a shape and dtype; its values are what was there."""
        size = math.prod(shape) * dtype.itemsize
        self.largest = max(self.largest, size)
        if size < _LARGE:
            return torch.empty(tuple(shape), dtype=dtype)
        pages = self._take(size)
        # The array lives as long as some tensor uses the pages, and tells when none does.
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._dropped.append, pages)
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Give back to the system the pages that nobody uses."""
        with self._lock:
            self._collect()
            self._free.clear()

    def _take(self, size: int) -> mmap.mmap:
        """Return pages of ``size`` bytes: dropped ones of that size, or fresh ones."""
        with self._lock:
            self._collect()
            self._used += size
            self._most = max(self._most, self._used)
            for place, pages in enumerate(self._free):
                if len(pages) == size:
                    return self._free.pop(place)
            # The pages that have waited longest make room for the fresh ones.
            waiting = sum(len(pages) for pages in self._free)
            while self._free and self._used + waiting > self._most:
                waiting -= len(self._free.pop(0))
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _collect(self) -> None:
        """Take what was dropped since for the next tensors of its size."""
        while self._dropped:
            pages = self._dropped.popleft()
            self._used -= len(pages)
            self._free.append(pages)
