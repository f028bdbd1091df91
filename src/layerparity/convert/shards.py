"""Shards: what each file of the result will hold, to the byte, before anything is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from layerparity.convert.policy import ITEM_BYTES, Policy, Why
from layerparity.errors import UserError
from layerparity.models import fp8
from layerparity.models.checkpoint import Checkpoint
from layerparity.models.header import Stored

_ALIGNED = 8


@dataclass(frozen=True)
class Tensor:
    """One tensor of the result: what it is made of, its type by the header's name, its bytes."""

    stored: Stored
    scales: Stored | None
    dtype: str
    bytes: int
    why: Why

    @property
    def name(self) -> str:
        """Return its name, which is the stored one."""
        return self.stored.name

    @property
    def source_bytes(self) -> int:
        """Return the bytes that are read for it, scales counted."""
        return self.stored.bytes + (self.scales.bytes if self.scales else 0)


@dataclass(frozen=True)
class Shard:
    """One file of the result: its name, and its tensors in the order of their bytes."""

    name: str
    tensors: tuple[Tensor, ...]

    @cached_property
    def header(self) -> bytes:
        """The file's beginning: the header's length and the header, padded with spaces."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for each in self.tensors:
            begin, end = end, end + each.bytes
            shape, offsets = list(each.stored.shape), [begin, end]
            entries[each.name] = {"dtype": each.dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        return struct.pack("<Q", len(text)) + text

    @cached_property
    def bytes(self) -> int:
        """The size of the file."""
        return len(self.header) + self.tensor_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(each.bytes for each in self.tensors)


def plan_shards(checkpoint: Checkpoint, policy: Policy) -> list[Shard]:
    """Return the result's files: the source's own, less the scales.

    Raises UserError for scales that belong to nothing, and for weights that cannot be read.
    """
    _refuse_odd_scales(checkpoint)
    held: dict[str, list[Tensor]] = {}
    for stored in checkpoint.weights.values():
        held.setdefault(stored.file.name, []).append(_tensor(checkpoint, policy, stored))
    return [Shard(name, tuple(sorted(held[name], key=_place))) for name in sorted(held)]


def weight_map(shards: list[Shard]) -> Mapping[str, str]:
    """Return the file of each tensor by name."""
    return {tensor.name: shard.name for shard in shards for tensor in shard.tensors}


def _tensor(checkpoint: Checkpoint, policy: Policy, stored: Stored) -> Tensor:
    dtype, why = policy.decide(stored)
    if why is not Why.DEQUANTISED:
        cast = dtype != stored.dtype
        size = ITEM_BYTES[dtype] * math.prod(stored.shape) if cast else stored.bytes
        return Tensor(stored, None, dtype, size, why)
    if len(stored.shape) < 2:
        raise UserError(
            f"{stored.name} is stored as {stored.dtype} with the shape {list(stored.shape)}, and "
            "blocks have two axes: fetch the checkpoint again."
        )
    scales = checkpoint.scales(stored.name)
    return Tensor(stored, scales, dtype, ITEM_BYTES[dtype] * math.prod(stored.shape), why)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Sort key: wide numbers first, so that each stands aligned; then as they are read."""
    count = math.prod(tensor.stored.shape)
    return -(tensor.bytes // count if count else _ALIGNED), tensor.stored.begin


def _refuse_odd_scales(checkpoint: Checkpoint) -> None:
    for name, scales in checkpoint.tensors.items():
        if not fp8.is_scale(name):
            continue
        weight = checkpoint.tensors.get(fp8.weight_name(name))
        if weight is None or weight.dtype not in fp8.STORED:
            what = f"stored as {weight.dtype}" if weight else "not there"
            raise UserError(
                f"{name} are the scales of {fp8.weight_name(name)}, which is {what}: "
                "fetch the checkpoint again."
            )
        if scales.dtype not in fp8.SCALES:
            raise UserError(
                f"{name} is stored as {scales.dtype}: scales are read as one of "
                f"{', '.join(fp8.SCALES)}."
            )
