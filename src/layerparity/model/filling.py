"""Fill memory with a stored tensor's values, straight from its file.

Each byte is read into its place, and hashed on the way. What has to change its type passes through
a scratch buffer of its stored type, a few megabytes at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layerparity.ground.profile import Spent
from layerparity.model.number_types import DTYPES
from layerparity.model.packed import PackedWeight, bands
from layerparity.model.tensor_hashes import HashAccount, TensorHashes, bytes_of

if TYPE_CHECKING:
    from layerparity.model.header import Stored
    from layerparity.model.reading import Files, ReadAhead


# Read, hashed and cast while it is still in the processor's cache.
CHUNK = 4 << 20


@dataclass
class Filler:
    """Fills one tensor after the other; each thread has one of its own."""

    files: Files
    hashing: bool = True
    ahead: ReadAhead | None = None

    def __post_init__(self) -> None:
        self.spent = Spent()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, stored: Stored, into: torch.Tensor) -> TensorHashes | None:
        """Fill ``into``, of the stored shape, cast to its type; return the hashes of what it holds.

        None without ``hashing``. Raises UserError where the file is cut off or has changed.
        """
        own = DTYPES[stored.dtype]
        account = HashAccount.of_cast(own, into.dtype) if self.hashing else None
        if own == into.dtype and into.is_contiguous():
            self._straight(stored, into, account)
        elif into.is_contiguous():
            self._cast(stored, into.view(-1), own, account)
        else:
            # A transposed place: the rows of the file lie across it.
            between = torch.empty(stored.shape, dtype=own)
            self._straight(stored, between, None)
            with self._converting():
                into.copy_(between)
            self._note(account, between, into, between)
        return account.done() if account else None

    def fill_packed(
        self, weight: PackedWeight, into: torch.Tensor, canonical: torch.dtype
    ) -> TensorHashes | None:
        """Fill ``into`` [..., row, column] with a packed weight's values; return their hashes.

        They are products and have no stored type: ``canonical`` is the one that a converted
        checkpoint has. They go through float32 a few rows at a time.
        """
        same = into.dtype == canonical == torch.bfloat16
        account = HashAccount(same=same, rounds=False) if self.hashing else None
        began, before = time.perf_counter(), self.spent.read + self.spent.hash
        for number, first, values in bands(weight, self.read):
            place = _matrix(into, number)[first : first + len(values)]
            place.copy_(values)
            if account:
                kept = place if into.dtype == canonical else values.to(canonical)
                self._note(account, kept, place, place)
        waited = self.spent.read + self.spent.hash - before
        self.spent.convert += time.perf_counter() - began - waited
        return account.done() if account else None

    def _straight(self, stored: Stored, into: torch.Tensor, account: HashAccount | None) -> None:
        flat = into.view(-1)
        step = CHUNK // into.dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            self.read(stored, start * into.dtype.itemsize, part.view(torch.uint8))
            self._note(account, part, part, part)

    def _cast(
        self, stored: Stored, into: torch.Tensor, own: torch.dtype, account: HashAccount | None
    ) -> None:
        step = CHUNK // own.itemsize
        for start in range(0, into.numel(), step):
            part = into[start : start + step]
            raw = self._space(part.numel() * own.itemsize)
            self.read(stored, start * own.itemsize, raw)
            with self._converting():
                part.copy_(raw.view(own))
            self._note(account, raw, part, raw.view(own))

    def read(self, stored: Stored, start: int, raw: torch.Tensor) -> None:
        """Read a stored tensor's bytes from ``start`` on into uint8 [byte]."""
        began = time.perf_counter()
        self.files.read(stored.file, stored.begin + start, bytes_of(raw))
        self.spent.read += time.perf_counter() - began
        self.spent.bytes += raw.numel()
        if self.ahead is not None:
            self.ahead.passed(raw.numel())

    def _note(
        self,
        account: HashAccount | None,
        raw: torch.Tensor,
        held: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        if account is not None:
            began = time.perf_counter()
            account.read(raw)
            account.put(held, source)
            self.spent.hash += time.perf_counter() - began

    @contextmanager
    def _converting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent.convert += time.perf_counter() - began

    def _space(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]


def _matrix(stack: torch.Tensor, number: int) -> torch.Tensor:
    """Return one matrix [row, column] of a stack [..., row, column], uncopied.

    What has one axis has rows of one number.
    """
    if stack.dim() == 1:
        return stack[:, None]
    while stack.dim() > 2:
        inside = math.prod(stack.shape[1:-2])
        stack, number = stack[number // inside], number % inside
    return stack
