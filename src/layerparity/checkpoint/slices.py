"""Cut a tensor into slices of rows, so that none is ever in memory as a whole, and read them.

A number that was finite as it was stored and would be Inf in the new type is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerparity.checkpoint.shards import ITEM_BYTES, PlannedTensor, Why
from layerparity.ground.errors import UserError
from layerparity.model.header import Stored

if TYPE_CHECKING:
    import torch

    from layerparity.model.filling import Filler
    from layerparity.model.page_pool import PagePool

# Bytes of a slice, as it is read or as it is written, whichever is more.
SLICE_BYTES = 16 << 20
_RAW = "U8"
# Wider ranges in their order; float16 has the smallest of all.
_WIDER = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class TensorSlice:
    """Some rows of a tensor: where they and their scales lie, and their new type.

    ``narrows``: the new type may not hold every number of them.
    """

    stored: Stored
    scales: Stored | None
    dtype: str
    block: tuple[int, int]
    narrows: bool = False


def slices(
    tensor: PlannedTensor, block: tuple[int, int], limit: int = SLICE_BYTES
) -> Iterator[TensorSlice]:
    """Yield a tensor's slices in their order, each of at most about ``limit`` bytes.

    FP8 weights are cut between two rows of blocks, so a slice has one such row at least.
    """
    if tensor.scales is not None:
        yield from _fp8_slices(tensor, tensor.scales, block, limit)
        return
    stored = tensor.stored
    # What keeps its type is copied as bytes, whatever the type is.
    raw = tensor.why in (Why.AS_STORED, Why.KEPT)
    own, dtype = (_RAW, _RAW) if raw else (stored.dtype, tensor.dtype)
    item = 1 if raw else ITEM_BYTES[own]
    step = max(limit // max(item, ITEM_BYTES.get(dtype, 1)), 1)
    count, narrows = stored.bytes // item, tensor.why is Why.ROUNDED
    for start in range(0, count, step):
        part = _part(stored, own, (min(step, count - start),), start, item)
        yield TensorSlice(part, None, dtype, block, narrows)


def _fp8_slices(
    tensor: PlannedTensor, scales: Stored, block: tuple[int, int], limit: int
) -> Iterator[TensorSlice]:
    stored = tensor.stored
    if not tensor.bytes:
        return
    rows, columns = stored.shape[-2:]
    bands, width = scales.shape[-2:]
    together = max(limit // max(block[0] * columns * ITEM_BYTES[tensor.dtype], 1), 1)
    for matrix in range(math.prod(stored.shape[:-2])):
        for band in range(0, bands, together):
            first, last = band * block[0], min((band + together) * block[0], rows)
            begin = (matrix * rows + first) * columns
            weight = _part(stored, stored.dtype, (last - first, columns), begin, 1)
            shape = (min(together, bands - band), width)
            begin, item = (matrix * bands + band) * width, ITEM_BYTES[scales.dtype]
            factors = _part(scales, scales.dtype, shape, begin, item)
            yield TensorSlice(weight, factors, tensor.dtype, block, narrows=True)


def _part(stored: Stored, dtype: str, shape: tuple[int, ...], start: int, item: int) -> Stored:
    """Return where the numbers from ``start`` on lie, each of ``item`` bytes."""
    size, begin = math.prod(shape) * item, stored.begin + start * item
    return replace(stored, dtype=dtype, shape=shape, bytes=size, begin=begin)


def slice_values(wanted: TensorSlice, filler: Filler, pool: PagePool) -> torch.Tensor:
    """Return a slice's values on the CPU, in its shape and new type.

    [number], or [row, column] of FP8 weights. Raises UserError where they do not fit the type.
    """
    from layerparity.model.filling import DTYPES

    into = pool.empty(wanted.stored.shape, DTYPES[wanted.dtype])
    if wanted.scales is None:
        filler.fill(wanted.stored, into)
    else:
        filler.fill_fp8(wanted.stored, wanted.scales, wanted.block, into, into.dtype)
    if wanted.narrows:
        _refuse_overflow(wanted, into, filler)
    return into


def _refuse_overflow(part: TensorSlice, values: torch.Tensor, filler: Filler) -> None:
    """Raise UserError where ``values``, a slice in its new type, has an Inf that was no Inf before.

    ``values`` has the slice's shape: [number], or [row, column] of FP8 weights. The stored numbers
    are read a second time only where there is an Inf or NaN. A scale that is Inf, and an Inf that
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
    # FP8 numbers are multiplied in float32, whatever they are written as.
    wider = _WIDER if part.scales is None else _WIDER[:-1]
    worst = lost.abs().max()
    fits = next((name for name in wider if worst.to(getattr(torch, name)).isfinite()), None)
    if fits is None:
        beyond += " once its scales are applied"
    cure = f"use dtype={fits}" if fits else "take weights and scales from one place"
    raise UserError(f"{part.stored.name} {beyond}: {cure}.")


def _exact(part: TensorSlice, where: torch.Tensor, filler: Filler) -> torch.Tensor:
    """Return the values at ``where``, a mask of the slice's shape, as float64 [number].

    FP8 numbers are multiplied with their scales without loss.
    """
    stored = _as_stored(part.stored, filler)
    if part.scales is None:
        return stored[where].double()
    rows, columns = part.stored.shape
    factors = _as_stored(part.scales, filler)
    wide = factors.repeat_interleave(part.block[0], 0)[:rows]
    wide = wide.repeat_interleave(part.block[1], 1)[:, :columns]
    # torch cannot pick out FP8 numbers.
    return stored.float()[where].double() * wide[where].double()


def _as_stored(stored: Stored, filler: Filler) -> torch.Tensor:
    """Return a stored tensor in its own type; FP8 numbers without their scales."""
    import torch

    from layerparity.model.filling import DTYPES

    into = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    filler.fill(stored, into)
    return into
