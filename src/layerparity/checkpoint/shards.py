"""Plan each file of a converted checkpoint to the byte, before any tensor is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from layerparity.anatomy.family import family_of
from layerparity.ground.errors import UserError
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.header import Stored
from layerparity.model.packed import PackedWeight
from layerparity.model.weight_types import stays_float32
from layerparity.numbers.pieces import LORA

_ALIGNED = 8
# Floating types that can be cast into each other: the header's name and the bytes of a number.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# By torch's name, which is what dtype= takes.
TARGETS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Numbers up to which a float32 matrix in an FP8 checkpoint is small: the router's [256, 3072] is.
SMALL = 1 << 20
# Numbers of few bits, which are no values without their scales.
_REFUSED = ("F8_E5M2", "F8_E4M3", "I8", "U8")


class Why(StrEnum):
    """What becomes of a tensor."""

    DEQUANTISED = "numbers times their scales"
    ADAPTED = "with what the adapter adds"
    ROUNDED = "rounded"
    WIDENED = "widened"
    KEPT = "small: kept as it is"
    AS_STORED = "copied"


@dataclass(frozen=True)
class Policy:
    """Decides for one checkpoint; ``target`` is the header's name of the type asked for.

    ``float32_patterns`` are the family's tensors that must not be rounded; ``quantised`` says that
    the checkpoint holds packed weights.
    """

    target: str
    float32_patterns: tuple[str, ...]
    quantised: bool

    def decide(self, stored: Stored) -> tuple[str, Why]:
        """Return the type a tensor is written in, and why.

        Raises UserError for a quantised weight that cannot be read.
        """
        if isinstance(stored, PackedWeight):
            return self.target, Why.ADAPTED if stored.dtype == LORA else Why.DEQUANTISED
        if stored.dtype in _REFUSED:
            raise UserError(
                f"{stored.name} is stored as {stored.dtype}, and config.json does not say how it "
                "is packed: give its quantization_config."
            )
        if stored.dtype == self.target or stored.dtype not in ITEM_BYTES:
            return stored.dtype, Why.AS_STORED
        if ITEM_BYTES[self.target] > ITEM_BYTES[stored.dtype]:
            return self.target, Why.WIDENED
        # What costs next to nothing in its own type, and may need it. Norms, biases and the
        # router's correction bias have one axis; what an FP8 checkpoint stores in float32 was left
        # so on purpose, as the router is.
        is_small = (
            len(stored.shape) < 2
            or stays_float32(stored.name, self.float32_patterns)
            or (self.quantised and math.prod(stored.shape) <= SMALL)
        )
        if ITEM_BYTES[self.target] < ITEM_BYTES[stored.dtype] and is_small:
            return stored.dtype, Why.KEPT
        return self.target, Why.ROUNDED


def policy_of(checkpoint: Checkpoint, dtype: str) -> Policy:
    """Return the policy of a checkpoint that is to be written in ``dtype`` (torch's name)."""
    family = family_of(str(checkpoint.config.get("model_type")))
    quantised = bool(checkpoint.unpacked.kinds - {LORA})
    return Policy(TARGETS[dtype], family.float32_patterns, quantised)


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the result: what it is made of, its type by the header's name, its bytes."""

    stored: Stored
    dtype: str
    bytes: int
    why: Why

    @property
    def name(self) -> str:
        """Return its name, which is the stored one."""
        return self.stored.name

    @property
    def files(self) -> set[Path]:
        """The files that are read for it."""
        stored = self.stored
        parts = stored.parts.values() if isinstance(stored, PackedWeight) else (stored,)
        return {part.file for part in parts}

    @property
    def source_bytes(self) -> int:
        """Return the bytes that are read for it, scales counted."""
        return self.stored.bytes


@dataclass(frozen=True)
class Shard:
    """One file of the result: its name, and its tensors in the order of their bytes."""

    name: str
    tensors: tuple[PlannedTensor, ...]

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
    for name in checkpoint.unpacked.faults:
        checkpoint.unpacked.refuse(name)
    by_file: dict[str, list[PlannedTensor]] = {}

    def place(tensor: PlannedTensor) -> tuple[int, int]:
        """Wide numbers first, so that each stands aligned; then as they are read."""
        count = math.prod(tensor.stored.shape)
        return -(tensor.bytes // count if count else _ALIGNED), tensor.stored.begin

    for stored in checkpoint.tensors.values():
        dtype, why = policy.decide(stored)
        cast = dtype != stored.dtype
        size = ITEM_BYTES[dtype] * math.prod(stored.shape) if cast else stored.bytes
        tensor = PlannedTensor(stored, dtype, size, why)
        # What an adapter holds whole is written where the tensor was that it takes the place of.
        home = checkpoint.stored.get(stored.name, stored).file.with_suffix(".safetensors").name
        by_file.setdefault(home, []).append(tensor)
    return [Shard(name, tuple(sorted(by_file[name], key=place))) for name in sorted(by_file)]


def weight_map(shards: list[Shard]) -> Mapping[str, str]:
    """Return the file of each tensor by name."""
    return {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
