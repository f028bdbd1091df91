"""Cut a tensor into slices of rows, so that none is ever in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from layerparity.checkpoint.shards import ITEM_BYTES, PlannedTensor, Why
from layerparity.model.header import Stored

# Bytes of a slice, as it is read or as it is written, whichever is more.
SLICE_BYTES = 16 << 20
_RAW = "U8"


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
