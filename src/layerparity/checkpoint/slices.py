"""Cut a tensor into slices of rows, so that none is ever in memory as a whole, and read them.

A number that was finite as it was stored and would be Inf in the new type is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from layerparity.checkpoint.shards import ITEM_BYTES, PlannedTensor, Why
from layerparity.ground.errors import UserError
from layerparity.model.header import Stored
from layerparity.model.packed import Matrix, PackedWeight
from layerparity.numbers.pieces import Pieces

if TYPE_CHECKING:
    import torch

    from layerparity.model.filling import Filler
    from layerparity.model.page_pool import PagePool

# Bytes of a slice, as it is read or as it is written, whichever is more.
SLICE_BYTES = 16 << 20
_RAW = "U8"
# Wider ranges in their order; float16 has the smallest of all.
_WIDER = ("bfloat16", "float32", "float64")


class PackedRows(NamedTuple):
    """Some rows of one matrix of a packed weight; all of them where it lies swapped."""

    weight: PackedWeight
    matrix: int
    first: int
    rows: int

    def pieces(self, filler: Filler) -> Pieces:
        """Return what their values are computed from."""
        matrix = Matrix(self.weight, self.matrix, filler.read)
        return self.weight.layout.pieces(matrix, self.first, self.rows)

    def values(self, filler: Filler) -> torch.Tensor:
        """Return their values, float32 [row, column]."""
        matrix = Matrix(self.weight, self.matrix, filler.read)
        return self.weight.layout.values(matrix, self.first, self.rows)


@dataclass(frozen=True)
class TensorSlice:
    """Some rows of a tensor: where they lie, of a packed one which, and their new type.

    ``narrows``: the new type may not hold every number of them.
    """

    stored: Stored
    dtype: str
    narrows: bool = False
    rows: PackedRows | None = None


def slices(tensor: PlannedTensor, limit: int = SLICE_BYTES) -> Iterator[TensorSlice]:
    """Yield a tensor's slices in their order, each of at most about ``limit`` bytes.

    Packed weights are cut where their format allows it.
    """
    stored = tensor.stored
    if isinstance(stored, PackedWeight):
        yield from _packed_slices(stored, tensor.dtype, limit)
        return
    # What keeps its type is copied as bytes, whatever the type is.
    raw = tensor.why in (Why.AS_STORED, Why.KEPT)
    own, dtype = (_RAW, _RAW) if raw else (stored.dtype, tensor.dtype)
    item = 1 if raw else ITEM_BYTES[own]
    step = max(limit // max(item, ITEM_BYTES.get(dtype, 1)), 1)
    count, narrows = stored.bytes // item, tensor.why is Why.ROUNDED
    for start in range(0, count, step):
        part = _part(stored, own, (min(step, count - start),), start, item)
        yield TensorSlice(part, dtype, narrows)


def _packed_slices(weight: PackedWeight, dtype: str, limit: int) -> Iterator[TensorSlice]:
    rows, columns = weight.matrix
    layout = weight.layout
    step = max(limit // max(columns * ITEM_BYTES[dtype] * layout.step, 1), 1) * layout.step
    for matrix in range(weight.matrices if math.prod(weight.shape) else 0):
        if not layout.by_rows:
            own = PackedRows(weight, matrix, 0, columns if layout.turned else rows)
            part = replace(weight, shape=(rows, columns))
            yield TensorSlice(part, dtype, narrows=True, rows=own)
            continue
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = replace(weight, shape=(count, columns))
            own = PackedRows(weight, matrix, first, count)
            yield TensorSlice(part, dtype, narrows=True, rows=own)


def _part(stored: Stored, dtype: str, shape: tuple[int, ...], start: int, item: int) -> Stored:
    """Return where the numbers from ``start`` on lie, each of ``item`` bytes."""
    size, begin = math.prod(shape) * item, stored.begin + start * item
    return replace(stored, dtype=dtype, shape=shape, bytes=size, begin=begin)


def slice_values(wanted: TensorSlice, filler: Filler, pool: PagePool) -> torch.Tensor:
    """Return a slice's values on the CPU, in its shape and new type.

    [number], or [row, column] of packed weights. Raises UserError where they do not fit the type.
    """
    from layerparity.model.number_types import DTYPES

    into = pool.empty(wanted.stored.shape, DTYPES[wanted.dtype])
    if wanted.rows is None:
        filler.fill(wanted.stored, into)
    else:
        values = wanted.rows.values(filler)
        into.copy_(values.T if wanted.rows.weight.layout.turned else values)
    if wanted.narrows:
        _refuse_overflow(wanted, into, filler)
    return into


def _refuse_overflow(part: TensorSlice, values: torch.Tensor, filler: Filler) -> None:
    """Raise UserError where ``values``, a slice in its new type, has an Inf that was no Inf before.

    ``values`` has the slice's shape: [number], or [row, column] of packed weights. What is stored
    is read a second time only where there is an Inf or NaN. A scale that is Inf, and an Inf that
    was stored as one, stay what they are.
    """
    import torch

    # One pass; isinf() takes ten times as long and a mask.
    if not values.numel() or all(math.isfinite(float(end)) for end in torch.aminmax(values)):
        return
    exact = _exact(part, values.isinf(), filler)
    lost = exact[exact.isfinite()]
    if not lost.numel():
        return
    dtype = str(values.dtype).removeprefix("torch.")
    beyond = f"holds values beyond {dtype}'s {torch.finfo(values.dtype).max:g}"
    # Packed numbers are multiplied in float32, whatever they are written as.
    wider = _WIDER if part.rows is None else _WIDER[:-1]
    worst = lost.abs().max()
    fits = next((name for name in wider if worst.to(getattr(torch, name)).isfinite()), None)
    if fits is None:
        beyond += " once its scales are applied"
    cure = f"use dtype={fits}" if fits else "take weights and scales from one place"
    raise UserError(f"{part.stored.name} {beyond}: {cure}.")


def _exact(part: TensorSlice, where: torch.Tensor, filler: Filler) -> torch.Tensor:
    """Return the values at ``where``, a mask of the slice's shape, as float64 [number].

    Packed numbers are multiplied with their scales without loss.
    """
    import torch

    from layerparity.model.number_types import DTYPES

    if part.rows is None:
        stored = torch.empty(part.stored.shape, dtype=DTYPES[part.stored.dtype])
        filler.fill(part.stored, stored)
        return stored[where].double()
    exact = part.rows.pieces(filler).exact()
    return (exact.T if part.rows.weight.layout.turned else exact)[where]
