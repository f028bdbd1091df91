"""Stream: every stored number once, in the order of the files, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.audit.finding import Finding
from layerparity.audit.headers import intact
from layerparity.audit.listing import Listing
from layerparity.audit.tally import Tally
from layerparity.console import Progress
from layerparity.errors import UserError
from layerparity.models import fp8
from layerparity.models.header import Stored

if TYPE_CHECKING:
    import torch

    from layerparity.models.reading import Files

# Bytes read at once: the chunk and its values in float32 stay in the processor's cache.
CHUNK = 1 << 20


def stream(
    listing: Listing, matching: set[str], block: tuple[int, int], bar: Progress
) -> tuple[dict[str, Tally], list[Finding]]:
    """Return the statistics of every tensor whose bytes are there, and what could not be examined.

    ``matching`` are the FP8 weights that are dequantised, with scales of blocks of ``block``.
    """
    from layerparity.models.reading import Files

    reader = _Reader(Files({}), listing.tensors, listing.sizes)
    order = sorted(listing.tensors.values(), key=lambda each: (each.file.name, each.begin))
    try:
        for stored in order:
            bar.step(stored.name)
            reader.examine(stored, stored.name in matching, block)
    finally:
        reader.files.close()
    return reader.tallies, [*reader.failed.values(), *reader.odd]


class _Reader:
    """Reads tensors of a listing in chunks of rows; keeps their statistics, and what went wrong.

    ``failed`` has the first fault of each file that the disk did not give, ``odd`` the tensors
    whose type cannot be examined.
    """

    def __init__(self, files: Files, tensors: Mapping[str, Stored], sizes: Mapping) -> None:
        self.files, self.tensors, self.sizes = files, tensors, sizes
        self.tallies: dict[str, Tally] = {}
        self.failed: dict[str, Finding] = {}
        self.odd: list[Finding] = []

    def examine(self, stored: Stored, is_fp8: bool, block: tuple[int, int]) -> None:
        """Take a tensor's statistics, where its bytes are there."""
        from layerparity.audit.numbers import HELD

        name, file = stored.name, stored.file
        if stored.dtype not in HELD:
            text = f"{name} is stored as {stored.dtype}: its values were not examined"
            self.odd.append(Finding("not_examined", text, name, file.name, note=True))
        elif file.name not in self.failed and intact(stored, self.sizes[file]):
            try:
                self.tallies[name] = self._tally(stored, is_fp8, block)
            except UserError as error:
                self.failed[file.name] = Finding("file_unread", str(error), name, file.name)

    def _tally(self, stored: Stored, is_fp8: bool, block: tuple[int, int]) -> Tally:
        """Return a tensor's statistics, of an FP8 weight with its scales applied."""
        tally = Tally()
        scales = self.tensors.get(fp8.scale_name(stored.name)) if is_fp8 else None
        whole = scales is not None and intact(scales, self.sizes[scales.file])
        chunks = self._widened(stored, scales, block) if scales and whole else self._plain(stored)
        for values in chunks:
            tally.add(values)
        return tally

    def _plain(self, stored: Stored) -> Iterator[torch.Tensor]:
        from layerparity.audit.numbers import widened

        for raw in self._raw(stored, CHUNK):
            yield widened(raw)

    def _widened(
        self, stored: Stored, scales: Stored, block: tuple[int, int]
    ) -> Iterator[torch.Tensor]:
        """Yield the values of each row of blocks; the matrices of a stack follow each other."""
        import torch

        if not stored.bytes:
            return
        rows, columns = stored.shape[-2:]
        factors = torch.cat(list(self._raw(scales, CHUNK))).reshape(-1, scales.shape[-1])
        per_matrix = scales.shape[-2]
        for number in range(factors.shape[0]):
            matrix, band = divmod(number, per_matrix)
            first, count = band * block[0], min(block[0], rows - band * block[0])
            start = (matrix * rows + first) * columns
            raw = torch.cat(list(self._raw(stored, CHUNK, start, count * columns)))
            yield fp8.dequantised(raw.view(count, columns), factors[number], block[1])

    def _raw(
        self, stored: Stored, step: int, start: int = 0, count: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers from ``start`` on, flat, at most ``step`` bytes at once."""
        import torch

        from layerparity.audit.numbers import HELD

        dtype = HELD[stored.dtype]
        begin = stored.begin + start * dtype.itemsize
        left = stored.bytes if count is None else count * dtype.itemsize
        while left:
            size = min(left, step)
            raw = torch.empty(size, dtype=torch.uint8)
            self.files.read(stored.file, begin, raw.numpy().data)
            yield raw.view(dtype)
            begin, left = begin + size, left - size
