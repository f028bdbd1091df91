"""Read stored tensors chunk by chunk and take the statistics of their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.checkpoint.finding import AuditFinding
from layerparity.checkpoint.headers import intact
from layerparity.ground.errors import UserError
from layerparity.ground.progress import Progress
from layerparity.model.header import Stored
from layerparity.model.packed import PackedWeight, bands

if TYPE_CHECKING:
    import torch

    from layerparity.model.reading import Files

# Between these a variance in float32 neither overflowed nor lost its smallest parts.
_SOUND = (1e-30, 1e30)
# Bytes read at once: the chunk and its values in float32 stay in the processor's cache.
CHUNK = 1 << 20


class ValueStatistics:
    """Counts, mean, standard deviation and range of the finite values of chunks.

    Chunks are merged as Chan, Golub and LeVeque (1983) do, each in float32 where its squares fit
    there, else in float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nan = 0
        self.inf = 0
        self.mean = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._squares = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Add a chunk: a floating tensor of any shape."""
        import torch

        flat = values.reshape(-1)
        if flat.numel() == 0:
            return
        least, most = (float(each) for each in torch.aminmax(flat))
        if not (math.isfinite(least) and math.isfinite(most)):
            nan = int(flat.isnan().sum())
            self.nan += nan
            finite = flat[flat.isfinite()]
            self.inf += flat.numel() - finite.numel() - nan
            self.add(finite)
            return
        count, (mean, variance) = flat.numel(), _moments(flat, least, most)
        total = self.count + count
        shift = mean - self.mean
        self._squares += variance * count + shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total
        self.least, self.most = min(self.least, least), max(self.most, most)

    @property
    def std(self) -> float:
        """Standard deviation of the finite values; 0 where there are none."""
        return math.sqrt(max(self._squares, 0.0) / self.count) if self.count else 0.0

    @property
    def constant(self) -> bool:
        """Whether there are several values, finite and all the same."""
        broken = self.nan or self.inf
        return not broken and self.count > 1 and self.least == self.most

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "mean": self.mean if math.isfinite(self.mean) else None,
            "std": self.std if math.isfinite(self.std) else None,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
            "nan": self.nan,
            "inf": self.inf,
        }


def _moments(flat: torch.Tensor, least: float, most: float) -> tuple[float, float]:
    """Return mean and variance of finite numbers, of which the least and the most are known."""
    if least == most:
        return least, 0.0
    # Two passes that stay in the cache; torch.var_mean takes ten times as long.
    mean = float(flat.sum()) / flat.numel()
    centred = flat - mean
    variance = float(centred.dot(centred)) / flat.numel()
    if flat.itemsize < 8 and not _SOUND[0] < variance < _SOUND[1]:
        return _moments(flat.double(), least, most)
    return mean, variance


def stream(
    tensors: Mapping[str, Stored], sizes: Mapping[Path, int], bar: Progress
) -> tuple[dict[str, ValueStatistics], list[AuditFinding]]:
    """Return the statistics of every tensor whose bytes are there, and what could not be examined.

    ``sizes`` are the bytes of each file.
    """
    from layerparity.model.reading import Files

    reader = _Reader(Files({}), sizes)
    order = sorted(tensors.values(), key=lambda each: (each.file.name, each.begin))
    try:
        for stored in order:
            bar.step(stored.name)
            reader.examine(stored)
    finally:
        reader.files.close()
    return reader.tallies, [*reader.failed.values(), *reader.odd]


class _Reader:
    """Reads tensors of a listing in chunks of rows; keeps their statistics, and what went wrong.

    ``failed`` has the first fault of each file that the disk did not give, ``odd`` the tensors
    whose type cannot be examined.
    """

    def __init__(self, files: Files, sizes: Mapping[Path, int]) -> None:
        self.files, self.sizes = files, sizes
        self.tallies: dict[str, ValueStatistics] = {}
        self.failed: dict[str, AuditFinding] = {}
        self.odd: list[AuditFinding] = []

    def examine(self, stored: Stored) -> None:
        """Take a tensor's statistics, where its bytes are there; of a packed one's values."""
        name, file = stored.name, stored.file
        packed = isinstance(stored, PackedWeight)
        if not packed and stored.dtype not in torch_types():
            text = f"{name} is stored as {stored.dtype}: its values were not examined"
            self.odd.append(AuditFinding("not_examined", text, name, file.name, note=True))
            return
        parts = stored.parts.values() if isinstance(stored, PackedWeight) else (stored,)
        if file.name in self.failed or not all(intact(e, self.sizes[e.file]) for e in parts):
            return
        if isinstance(stored, PackedWeight):
            chunks = (band.values for band in bands(stored, self._read))
        else:
            chunks = (widened(raw) for raw in self._raw(stored))
        tally = ValueStatistics()
        try:
            for values in chunks:
                tally.add(values)
        except UserError as error:
            self.failed[file.name] = AuditFinding("file_unread", str(error), name, file.name)
        else:
            self.tallies[name] = tally

    def _raw(self, stored: Stored) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers, flat, at most `CHUNK` bytes at once."""
        import torch

        dtype = torch_types()[stored.dtype]
        for begin in range(0, stored.bytes, CHUNK):
            raw = torch.empty(min(stored.bytes - begin, CHUNK), dtype=torch.uint8)
            self._read(stored, begin, raw)
            yield raw.view(dtype)

    def _read(self, stored: Stored, start: int, raw: torch.Tensor) -> None:
        self.files.read(stored.file, stored.begin + start, raw.numpy().data)


@cache
def torch_types() -> dict[str, torch.dtype]:
    """Return the stored types that torch can hold, beside those that runs read.

    Of F4 and F6, several to a byte, torch holds the bytes at most.
    """
    import torch

    from layerparity.model.number_types import DTYPES

    return {
        **DTYPES,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "C64": torch.complex64,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    }


def widened(raw: torch.Tensor) -> torch.Tensor:
    """Return stored numbers [number] as float32 or float64; complex ones as [number, part]."""
    import torch

    if raw.dtype in (torch.float32, torch.float64):
        return raw
    if raw.is_complex():
        return torch.view_as_real(raw)
    # Powers of two up to 2^127, and whole numbers up to 2^64: their squares leave float32.
    large = (torch.float8_e8m0fnu, torch.int64, torch.uint64, torch.int32, torch.uint32)
    return raw.double() if raw.dtype in large else raw.float()
