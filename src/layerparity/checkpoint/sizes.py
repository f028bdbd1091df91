"""Count a checkpoint's numbers and bytes, as stored and widened: whole, by layer, by dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.model.header import Stored
from layerparity.model.packed import PackedWeight
from layerparity.model.packing import is_scale

# The first number of a name, after what the common families call their list of blocks.
# No model has a million layers: a longer number is something else.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,6})\.")
LARGEST = 10


@dataclass
class ByteCounts:
    """Tensors, numbers (scales of packed weights are none) and bytes.

    ``bf16`` and ``fp32`` are the bytes once floating numbers are widened to that; what is no
    floating number keeps its size.
    """

    tensors: int = 0
    numbers: int = 0
    stored: int = 0
    bf16: int = 0
    fp32: int = 0

    def add(self, stored: Stored, tensors: int = 1) -> None:
        """Count one weight that stands in so many stored tensors."""
        self.tensors += tensors
        self.stored += stored.bytes
        if is_scale(stored.name):
            return
        count = math.prod(stored.shape)
        floating = isinstance(stored, PackedWeight) or stored.dtype.startswith(("F", "BF"))
        self.numbers += count
        self.bf16 += 2 * count if floating else stored.bytes
        self.fp32 += 4 * count if floating else stored.bytes


@dataclass
class CheckpointSizes:
    """Bytes of the whole, of each layer, of what is in none, and by dtype; the largest tensors.

    ``buffers`` are the numbers that fill no parameter, ``copies`` those of what is tied to another
    parameter and stored as well; the whole holds both.
    """

    whole: ByteCounts = field(default_factory=ByteCounts)
    layers: dict[int, ByteCounts] = field(default_factory=dict)
    outside: ByteCounts = field(default_factory=ByteCounts)
    dtypes: dict[str, ByteCounts] = field(default_factory=dict)
    largest: list[Stored] = field(default_factory=list)
    buffers: int = 0
    copies: int = 0

    @property
    def parameters(self) -> int:
        """Numbers stored for parameters, each once."""
        return self.whole.numbers - self.buffers - self.copies

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "tensors": self.whole.tensors,
            "parameters": self.parameters,
            "buffers": self.buffers,
            "copies": self.copies,
            "bytes": {
                "stored": self.whole.stored,
                "bf16": self.whole.bf16,
                "fp32": self.whole.fp32,
            },
            "dtypes": {
                name: {"tensors": each.tensors, "numbers": each.numbers, "bytes": each.stored}
                for name, each in self.dtypes.items()
            },
            "layers": [{"layer": layer, **asdict(each)} for layer, each in self.layers.items()],
            "outside_layers": asdict(self.outside),
            "largest": [
                {
                    "name": each.name,
                    "file": each.file.name,
                    "dtype": each.dtype,
                    "shape": list(each.shape),
                    "bytes": each.bytes,
                }
                for each in self.largest
            ],
        }


def layer_of(name: str) -> int | None:
    """Return the layer a stored name belongs to, or None."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def measure(
    tensors: Mapping[str, Stored], buffers: Iterable[str], copies: Iterable[str]
) -> CheckpointSizes:
    """Return the sizes of tensors, of which these fill no parameter, and these one once more."""
    sizes = CheckpointSizes()
    for stored in tensors.values():
        layer = layer_of(stored.name)
        part = sizes.outside if layer is None else sizes.layers.setdefault(layer, ByteCounts())
        for each in (sizes.whole, part):
            each.add(stored, len(stored.parts) if isinstance(stored, PackedWeight) else 1)
        sizes.dtypes.setdefault(stored.dtype, ByteCounts()).add(stored)
    sizes.layers = dict(sorted(sizes.layers.items()))
    sizes.dtypes = dict(sorted(sizes.dtypes.items(), key=lambda pair: -pair[1].stored))
    sizes.largest = sorted(tensors.values(), key=lambda each: (-each.bytes, each.name))[:LARGEST]
    sizes.buffers, sizes.copies = (
        sum(math.prod(tensors[name].shape) for name in names if name in tensors)
        for names in (buffers, copies)
    )
    return sizes
