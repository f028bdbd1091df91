"""INT4 and INT8 as compressed-tensors packs them: rows of numbers in words of 32 bits.

A number is stored with half its range added. Zero points are packed along the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, ORDER, SCALES, ZEROS, MadeOfPieces, Matrix, unsigned
from layerparity.model.packing_format import (
    SCALE_TYPES,
    Format,
    Laid,
    Quantization,
    UnfitError,
    check_part,
)
from layerparity.numbers.pieces import Pieces

_WORD = 32


@dataclass(frozen=True)
class Words(MadeOfPieces):
    """A layout of numbers of so many bits, of which ``group`` of a row share a scale."""

    bits: int
    group: int
    turned: bool = False
    by_rows: bool = True
    step: int = 1

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        columns, half = matrix.weight.shape[-1], 1 << (self.bits - 1)
        numbers = unsigned(matrix.rows(NUMBERS, first, count), self.bits)[:, :columns]
        scales, zeros = matrix.rows(SCALES, first, count).float().reshape(count, -1), None
        if matrix.has(ZEROS):
            turned = unsigned(matrix.whole(ZEROS).T.contiguous(), self.bits)
            zeros = turned.T[first : first + count] - half
        order = matrix.whole(ORDER) if matrix.has(ORDER) else None
        return Pieces(numbers.contiguous().sub_(half), scales, self.group, zeros, order)


def lay(parts: Mapping[str, Stored], settings: Quantization) -> Laid:
    """Return how a weight lies. Raises UnfitError where words and scales are not of one weight."""
    numbers, scales = parts[NUMBERS], parts[SCALES]
    if scales.dtype not in SCALE_TYPES:
        raise UnfitError("scale_type", f"{scales.name} is stored as {scales.dtype}", scales)
    *lead, words = numbers.shape
    groups = scales.shape[-1] if len(scales.shape) == len(numbers.shape) else 0
    for bits, group in _said(settings):
        # A row is padded to whole words, and what its groups hold says by how much.
        columns = groups * group if group else words * (_WORD // bits)
        fits = scales.shape[:-1] == tuple(lead) and words == -(-columns * bits // _WORD)
        if fits and groups == (columns // group if group else 1):
            packed = -(-lead[-1] * bits // _WORD)
            check_part(parts, ZEROS, (*lead[:-1], packed, groups), "I32")
            check_part(parts, ORDER, (columns,), "I32", "I64")
            return Laid(f"INT{bits}", (*lead, columns), Words(bits, group or columns))
    text = (
        f"{scales.name} has the shape {list(scales.shape)}, which fits no group of config.json's "
        f"quantization_config for words of {list(numbers.shape)}"
    )
    raise UnfitError("scale_shape", text, scales)


def _said(settings: Quantization) -> Iterator[tuple[int, int]]:
    """Yield bits and group size, 0 for a scale by row, of what config.json says of weights."""
    for said in settings.weights():
        bits, group = said.get("num_bits"), said.get("group_size")
        if bits in (4, 8):
            yield (4 if bits == 4 else 8), group if isinstance(group, int) and group > 0 else 0


FORMAT = Format(
    dtypes=("I32",),
    suffixes=("_packed",),
    parts={SCALES: ("_scale",), ZEROS: ("_zero_point",), ORDER: ("_g_idx",)},
    needed=(SCALES,),
    lay=lay,
    methods=("compressed-tensors",),
    unused=("_shape",),
)
