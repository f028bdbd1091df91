"""Load a stage's weights from the checkpoint straight into their finished place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from layerparity.ground import progress
from layerparity.ground.profile import Spent
from layerparity.model.filling import Filler
from layerparity.model.packed import PackedWeight
from layerparity.model.page_pool import PagePool
from layerparity.model.reading import ReadAhead
from layerparity.model.recipe import WantedWeight
from layerparity.model.tensor_hashes import TensorHashes

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.header import Stored


# More do not read faster from one disk, and take the processor from what is being computed.
_THREADS = min(2, os.cpu_count() or 1)


@dataclass
class Loaded:
    """A stage's weights by module weight, what each tensor used held, and what it took.

    ``weights`` are on the CPU, in the module's shapes and the types they are held in.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: dict[str, TensorHashes] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)


class Loader:
    """Reads stages from one checkpoint, at most one ahead of the one that is used.

    Every large buffer is a finished weight in the type it is held in: there is no other.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.pool = PagePool()
        self._ahead: tuple[str, Future[Loaded]] | None = None
        self._filled: dict[str, TensorHashes] = {}
        self._reading: ReadAhead | str = ""
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
        with progress.measured(lambda: str(self._reading)):
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
        stored = self._stored(name for name, _ in todo)
        self._reading = ahead = ReadAhead(self.checkpoint.files, stored)
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
        """Yield where tensors lie, of a packed weight each part."""
        for name in names:
            stored = self.checkpoint.tensors[name]
            yield from stored.parts.values() if isinstance(stored, PackedWeight) else (stored,)

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
