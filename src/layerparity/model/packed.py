"""A packed weight: which stored tensors it is made of, and how a few of its rows are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from layerparity.model.header import Stored
from layerparity.numbers.pieces import Pieces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

# Bytes of float32 values that are made at once: they stay in the processor's cache.
_BAND = 4 << 20
_WHOLE = tuple(float(each) for each in range(16))
# What each role of a part is called; a format says how the tensor of each is named.
NUMBERS, SCALES, ZEROS, OVERALL, ORDER = "numbers", "scales", "zeros", "overall", "order"
# Reads bytes of a stored tensor from a position in it on, into uint8 [byte].
Read = Callable[[Stored, int, "torch.Tensor"], None]


class PackingLayout(Protocol):
    """How the parts of one weight lie."""

    @property
    def step(self) -> int:
        """Rows between two places where the weight can be cut."""

    @property
    def turned(self) -> bool:
        """Whether the parts hold the weight with rows and columns swapped."""

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be read without the others."""

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""

    def values(self, matrix: Matrix, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on, float32 [row, column]."""


class MadeOfPieces:
    """A layout whose values are made of its pieces."""

    def values(self: PackingLayout, matrix: Matrix, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on, float32 [row, column]."""
        return self.pieces(matrix, first, count).values()


@dataclass(frozen=True)
class PackedWeight(Stored):
    """A weight that stands in several stored tensors, its ``parts`` by role.

    ``shape`` is that of its values, ``dtype`` the format's name, ``bytes`` those of all parts;
    ``file`` and ``begin`` are where its numbers lie.
    """

    parts: Mapping[str, Stored] = field(default_factory=dict, kw_only=True)
    layout: PackingLayout = field(kw_only=True)

    @property
    def matrices(self) -> int:
        """How many matrices are stacked in it."""
        return math.prod(self.shape[:-2])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each: what has one axis has rows of one number."""
        rows, columns = (*self.shape, 1)[:2] if len(self.shape) < 2 else self.shape[-2:]
        return rows, columns


@dataclass
class Matrix:
    """One matrix of a packed weight, whose parts are read as they are asked for."""

    weight: PackedWeight
    number: int
    read: Read
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def has(self, role: str) -> bool:
        """Say whether the weight has such a part."""
        return role in self.weight.parts

    def rows(self, role: str, first: int, count: int) -> torch.Tensor:
        """Return rows of a part, of its own type: [row, ...]."""
        part, shape, start = self._place(role)
        row = math.prod(shape[1:])
        return self._read(part, start + first * row, (count, *shape[1:]))

    def whole(self, role: str) -> torch.Tensor:
        """Return what a part holds of this matrix, of its own type; read once."""
        if role not in self._whole:
            part, shape, start = self._place(role)
            self._whole[role] = self._read(part, start, shape)
        return self._whole[role]

    def _place(self, role: str) -> tuple[Stored, tuple[int, ...], int]:
        """Return a part, the shape of what this matrix has of it, and its first element there."""
        part, lead = self.weight.parts[role], self.weight.shape[:-2]
        if part.shape[: len(lead)] != lead:
            return part, part.shape, 0
        shape = part.shape[len(lead) :]
        return part, shape, self.number * math.prod(shape)

    def _read(self, part: Stored, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        from layerparity.model.number_types import DTYPES

        # An exponent alone is a number of nothing but scales.
        own = DTYPES.get(part.dtype, torch.uint8)
        raw = torch.empty(math.prod(shape) * own.itemsize, dtype=torch.uint8)
        self.read(part, start * own.itemsize, raw)
        return raw.view(own).view(shape)


class Band(NamedTuple):
    """Rows of one matrix of a weight, from ``first`` on: float32 values [row, column]."""

    matrix: int
    first: int
    values: torch.Tensor


def bands(weight: PackedWeight, read: Read) -> Iterator[Band]:
    """Yield a weight's values in the order of its shape, a few rows at a time.

    A matrix that lies with rows and columns swapped comes as a whole.
    """
    if not math.prod(weight.shape):
        return
    layout = weight.layout
    rows, columns = weight.matrix
    for number in range(weight.matrices):
        matrix = Matrix(weight, number, read)
        if layout.turned:
            values = layout.values(matrix, 0, columns)
            yield Band(number, 0, values.T.contiguous())
            continue
        count = max(_BAND // (4 * columns) // layout.step, 1) * layout.step
        for first in range(0, rows, count):
            values = layout.values(matrix, first, min(count, rows - first))
            yield Band(number, first, values)


def pieces_of(weight: PackedWeight, read: Read) -> Iterator[Pieces]:
    """Yield what each matrix is computed from; one that lies swapped is left swapped."""
    rows = weight.matrix[weight.layout.turned]
    for number in range(weight.matrices):
        yield weight.layout.pieces(Matrix(weight, number, read), 0, rows)


def unsigned(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of four or eight bits in int32 words [row, word], the lowest bits first.

    float32 [row, number].
    """
    import torch

    raw = words.contiguous().view(torch.uint8)
    return raw.float() if bits == 8 else nibbles(raw, _WHOLE)


def nibbles(raw: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Return two numbers for each byte of uint8 [..., byte], the lower four bits first.

    ``values`` are the sixteen that four bits stand for. Words of 32 bits lie so, too, by bytes.
    """
    import numpy as np
    import torch

    # Both numbers of a byte are one of eight bytes, which is looked up a few times as fast.
    found = torch.from_numpy(np.take(_pairs(values), raw.contiguous().view(-1).numpy()))
    return found.view(torch.float32).view(*raw.shape[:-1], 2 * raw.shape[-1])


@cache
def _pairs(values: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Return the two float32 numbers of every byte, as the bits of one float64."""
    import numpy as np

    table, every = np.array(values, np.float32), np.arange(256)
    pairs = np.stack([table[every & 15], table[every >> 4]], 1)
    return pairs.reshape(-1).view(np.float64)


@cache
def eight_bits(dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 value of every number of an eight-bit type, by its bits."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def widened(numbers: torch.Tensor) -> torch.Tensor:
    """Return eight-bit numbers of any shape in float32."""
    import torch

    # All 256 numbers looked up take half the time of one cast after the other.
    places = numbers.view(torch.uint8).flatten().to(torch.int32)
    return eight_bits(numbers.dtype).index_select(0, places).view(numbers.shape)
