"""Loader: the weights of a stage, read from the checkpoint straight into their finished place.

Touching a fresh page costs several times what copying into a used one does, and the C library's
own allocator keeps blocks of up to 32 MB for later, which a stream of weights would turn into a
heap far larger than what it holds.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from layerparity.ground.profile import Spent
from layerparity.model.filling import Filled, Filler
from layerparity.model.reading import ReadAhead
from layerparity.model.recipe import WantedWeight

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.header import Stored


# More do not read faster from one disk, and take the processor from what is being computed.
_THREADS = min(2, os.cpu_count() or 1)


@dataclass
class Loaded:
    """A stage's weights by module weight, what each tensor used held, and what it took."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: dict[str, Filled] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)


class Loader:
    """Reads stages from one checkpoint, at most one ahead of the one that is used.

    Every large buffer is a finished weight in the type it is held in: there is no other.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.pool = Pool()
        self._ahead: tuple[str, Future[Loaded]] | None = None
        self._filled: dict[str, Filled] = {}
        self._background = ThreadPoolExecutor(1, "read-ahead")
        self._threads = ThreadPoolExecutor(_THREADS, "read")

    def expect(self, stage: str, due: Mapping[str, WantedWeight]) -> None:
        """Begin to read a stage that will be wanted next."""
        if self._ahead is None:
            self._ahead = stage, self._background.submit(self._load, due)

    def load(self, stage: str, due: Mapping[str, WantedWeight]) -> Loaded:
        """Return a stage's weights, as soon as they are read. Raises UserError for damage.

        Tensors are hashed the first time they are read; afterwards their files' stamps vouch.
        """
        if self._ahead is not None:
            coming, future = self._ahead
            self._ahead = None
            loaded = future.result()
            if coming == stage:
                return loaded
        return self._background.submit(self._load, due).result()

    def read(self, names: Iterable[str]) -> Loaded:
        """Return stored tensors as `Checkpoint.read` gives them, for what has no place of its own.

        Here ``weights`` is by stored name. They are counted and hashed as all others are.
        """
        loaded = Loaded()
        for name in sorted(names, key=self._position):
            loaded.weights[name] = self.checkpoint.empty(name)
        loaded.spent = self._fill(iter(list(loaded.weights.items())), None)
        self._settle(loaded, loaded.weights)
        return loaded

    def _load(self, due: Mapping[str, WantedWeight]) -> Loaded:
        loaded = Loaded()
        todo: list[tuple[str, torch.Tensor]] = []
        for weight, each in due.items():
            held = loaded.weights[weight] = self.pool.empty(each.recipe.shape, each.dtype)
            todo += [(source.name, source.view(held)) for source in each.recipe.sources]
        # In the order of the files: a disk reads on faster than it jumps.
        todo.sort(key=lambda item: self._position(item[0]))
        ahead = ReadAhead(self.checkpoint.files, self._stored(name for name, _ in todo))
        queue = iter(todo)
        filling = [self._threads.submit(self._fill, queue, ahead) for _ in range(_THREADS)]
        try:
            for each_filling in filling:
                loaded.spent += each_filling.result()
        except BaseException:
            # Nothing that is left is wanted; the other threads end with what they are reading.
            list(queue)
            wait(filling)
            raise
        self._settle(loaded, dict.fromkeys(name for name, _ in todo))
        return loaded

    def _settle(self, loaded: Loaded, names: Iterable[str]) -> None:
        """Make sure that no file changed while it was read, and say what every tensor held."""
        for file in {stored.file for stored in self._stored(names)}:
            self.checkpoint.files.check(file)
        loaded.filled = {name: self._filled[name] for name in names}

    def _stored(self, names: Iterable[str]) -> Iterator[Stored]:
        """Yield where tensors lie, each after its scales."""
        for name in names:
            scales = self.checkpoint.scales(name)
            if scales is not None:
                yield scales
            yield self.checkpoint.tensors[name]

    def _fill(self, queue: Iterator[tuple[str, torch.Tensor]], ahead: ReadAhead | None) -> Spent:
        """Fill what is left in a queue that threads share."""
        files = self.checkpoint.files
        fillers = {known: Filler(files, not known, ahead) for known in (False, True)}
        for name, into in queue:
            filler = fillers[name in self._filled]
            filled = self.checkpoint.fill(filler, name, into)
            if filled is not None:
                self._filled[name] = filled
        total = Spent()
        for filler in fillers.values():
            total += filler.spent
        return total

    def _position(self, name: str) -> tuple[str, int]:
        stored = self.checkpoint.tensors[name]
        return stored.file.name, stored.begin


_LARGE = 1 << 18


class Pool:
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
        """Return a tensor whose values are whatever was there before."""
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
        with self._lock:
            self._collect()
            self._used += size
            self._most = max(self._most, self._used)
            for place, pages in enumerate(self._free):
                if len(pages) == size:
                    return self._free.pop(place)
            self._trim(size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _trim(self, fresh: int) -> None:
        """Drop the pages that have waited longest until there is room for ``fresh`` bytes."""
        waiting = sum(len(pages) for pages in self._free)
        while self._free and self._used + waiting > self._most:
            waiting -= len(self._free.pop(0))

    def _collect(self) -> None:
        """Take what was dropped since for the next tensors of its size."""
        while self._dropped:
            pages = self._dropped.popleft()
            self._used -= len(pages)
            self._free.append(pages)
