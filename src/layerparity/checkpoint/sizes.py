"""Sizes: numbers and bytes of a checkpoint, as stored and widened: whole, by layer, by dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.checkpoint.finding import Finding
from layerparity.ground.errors import UserError
from layerparity.model import weight_types
from layerparity.model.header import Stored

# The first number of a name, after what the common families call their list of blocks.
# No model has a million layers: a longer number is something else.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,6})\.")
LARGEST = 10


@dataclass
class Bytes:
    """Tensors, numbers (scales of FP8 weights are none) and bytes.

    ``bf16`` and ``fp32`` are the bytes once floating numbers are widened to that; what is no
    floating number keeps its size.
    """

    tensors: int = 0
    numbers: int = 0
    stored: int = 0
    bf16: int = 0
    fp32: int = 0

    def add(self, stored: Stored) -> None:
        """Count one stored tensor."""
        self.tensors += 1
        self.stored += stored.bytes
        if weight_types.is_scale(stored.name):
            return
        count = math.prod(stored.shape)
        floating = stored.dtype.startswith(("F", "BF"))
        self.numbers += count
        self.bf16 += 2 * count if floating else stored.bytes
        self.fp32 += 4 * count if floating else stored.bytes


@dataclass
class Sizes:
    """Bytes of the whole, of each layer, of what is in none, and by dtype; the largest tensors.

    ``buffers`` are the numbers that fill no parameter; the whole holds them as well.
    """

    whole: Bytes = field(default_factory=Bytes)
    layers: dict[int, Bytes] = field(default_factory=dict)
    outside: Bytes = field(default_factory=Bytes)
    dtypes: dict[str, Bytes] = field(default_factory=dict)
    largest: list[Stored] = field(default_factory=list)
    buffers: int = 0

    @property
    def parameters(self) -> int:
        """Numbers stored for parameters."""
        return self.whole.numbers - self.buffers

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "tensors": self.whole.tensors,
            "parameters": self.parameters,
            "buffers": self.buffers,
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


def measure(tensors: Mapping[str, Stored], buffers: Iterable[str]) -> Sizes:
    """Return the sizes of tensors; ``buffers`` are the names that fill no parameter."""
    sizes = Sizes()
    for stored in tensors.values():
        layer = layer_of(stored.name)
        part = sizes.outside if layer is None else sizes.layers.setdefault(layer, Bytes())
        for each in (sizes.whole, part, sizes.dtypes.setdefault(stored.dtype, Bytes())):
            each.add(stored)
    sizes.layers = dict(sorted(sizes.layers.items()))
    sizes.dtypes = dict(sorted(sizes.dtypes.items(), key=lambda pair: -pair[1].stored))
    sizes.largest = sorted(tensors.values(), key=lambda each: (-each.bytes, each.name))[:LARGEST]
    sizes.buffers = sum(math.prod(tensors[name].shape) for name in buffers if name in tensors)
    return sizes


_EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2")
_READ = ("F32", "BF16", "F16")
_USUAL = (128, 128)


@dataclass
class Scales:
    """How many weights are FP8, how many of them have scales, and of the right shape.

    ``matching`` holds the names of the weights that can be dequantised; ``block`` is the rows and
    columns that one scale serves.
    """

    block: tuple[int, int] = _USUAL
    weights: int = 0
    present: int = 0
    matching: set[str] = field(default_factory=set)
    orphans: int = 0
    findings: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "block": list(self.block),
            "weights": self.weights,
            "present": self.present,
            "matching": len(self.matching),
            "orphans": self.orphans,
        }


def check_scales(
    config: Mapping[str, Any], tensors: Mapping[str, Stored], lost: set[str]
) -> Scales:
    """Hold FP8 weights and scales against each other; nothing is said of the names in ``lost``."""
    result = Scales()
    try:
        result.block = weight_types.block_of(config)
    except UserError as error:
        _add(result, "quantization_unread", str(error))
    except (AttributeError, TypeError, ValueError):
        _add(result, "quantization_unread", "config.json's quantization_config cannot be read")
    for stored in tensors.values():
        if weight_types.is_scale(stored.name):
            _scale(result, stored, tensors, lost)
        elif stored.dtype in _EIGHT_BIT_FLOATS:
            _weight(result, stored, tensors, lost)
    if result.weights and config and config.get("quantization_config") is None:
        text = f"{result.weights} weights are FP8 and config.json has no quantization_config"
        _add(result, "quantization_unsaid", text)
    return result


def _weight(result: Scales, stored: Stored, tensors: Mapping[str, Stored], lost: set[str]) -> None:
    result.weights += 1
    name = weight_types.scale_name(stored.name)
    scales = tensors.get(name)
    if scales is None:
        if name not in lost:
            _add(result, "scale_missing", f"{stored.name} is FP8 without {name}", stored)
        return
    result.present += 1
    if len(stored.shape) < 2:
        _add(result, "scale_shape", f"{stored.name} has one axis: it has no blocks", stored)
        return
    due = weight_types.scale_shape(stored.shape, result.block)
    if scales.shape != due:
        text = (
            f"{name} has the shape {list(scales.shape)}; {list(stored.shape)} in blocks of "
            f"{list(result.block)} wants {list(due)}"
        )
        _add(result, "scale_shape", text, scales)
    elif scales.dtype not in _READ:
        _add(result, "scale_type", f"{name} is stored as {scales.dtype}", scales)
    elif stored.dtype in weight_types.STORED:
        result.matching.add(stored.name)


def _scale(result: Scales, stored: Stored, tensors: Mapping[str, Stored], lost: set[str]) -> None:
    name = weight_types.weight_name(stored.name)
    weight = tensors.get(name)
    if weight is None and name not in lost:
        result.orphans += 1
        _add(result, "scale_orphan", f"{stored.name} is there, and no {name}", stored)
    elif weight is not None and weight.dtype not in _EIGHT_BIT_FLOATS:
        result.orphans += 1
        text = f"{stored.name} is there, and {name} is {weight.dtype}"
        _add(result, "scale_orphan", text, stored)


def _add(result: Scales, what: str, text: str, stored: Stored | None = None) -> None:
    tensor, file = (stored.name, stored.file.name) if stored else ("", "config.json")
    count = 1 if stored else 0
    result.findings.append(Finding(what, text, tensor, file, count))
