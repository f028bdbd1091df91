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
    """Return the statistics of every tensor whose bytes are there, and files that failed.

    ``matching`` are the FP8 weights that are dequantised, with scales of blocks of ``block``.
    """
    from layerparity.models.filling import DTYPES
    from layerparity.models.reading import Files

    files, sizes = Files({}), listing.sizes
    tallies: dict[str, Tally] = {}
    failed: dict[str, Finding] = {}
    order = sorted(listing.tensors.values(), key=lambda each: (each.file.name, each.begin))
    try:
        for stored in order:
            bar.step(stored.name)
            readable = stored.dtype in DTYPES and intact(stored, sizes[stored.file])
            if not readable or stored.file.name in failed:
                continue
            try:
                reader = _Reader(files, listing.tensors, sizes)
                tallies[stored.name] = reader.tally(stored, stored.name in matching, block)
            except UserError as error:
                name = stored.file.name
                failed[name] = Finding("file_unread", str(error), stored.name, name)
    finally:
        files.close()
    return tallies, list(failed.values())


class _Reader:
    """Reads tensors of a listing in chunks of rows."""

    def __init__(self, files: Files, tensors: Mapping[str, Stored], sizes: Mapping) -> None:
        self.files, self.tensors, self.sizes = files, tensors, sizes

    def tally(self, stored: Stored, is_fp8: bool, block: tuple[int, int]) -> Tally:
        """Return a tensor's statistics, of an FP8 weight with its scales applied."""
        tally = Tally()
        scales = self.tensors.get(fp8.scale_name(stored.name)) if is_fp8 else None
        whole = scales is not None and intact(scales, self.sizes[scales.file])
        chunks = self._widened(stored, scales, block) if scales and whole else self._plain(stored)
        for values in chunks:
            tally.add(values)
        return tally

    def _plain(self, stored: Stored) -> Iterator[torch.Tensor]:
        import torch

        for raw in self._raw(stored, CHUNK):
            yield raw if raw.dtype in (torch.float32, torch.float64) else raw.float()

    def _widened(
        self, stored: Stored, scales: Stored, block: tuple[int, int]
    ) -> Iterator[torch.Tensor]:
        """Yield the values of each row of blocks; the matrices of a stack follow each other."""
        import torch

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

        from layerparity.models.filling import DTYPES

        dtype = DTYPES[stored.dtype]
        begin = stored.begin + start * dtype.itemsize
        left = stored.bytes if count is None else count * dtype.itemsize
        while left:
            size = min(left, step)
            raw = torch.empty(size, dtype=torch.uint8)
            self.files.read(stored.file, begin, raw.numpy().data)
            yield raw.view(dtype)
            begin, left = begin + size, left - size
