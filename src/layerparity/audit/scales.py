"""Scales: whether every FP8 weight has scales of the right shape, and no scale is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity.audit.finding import Finding
from layerparity.errors import UserError
from layerparity.models import fp8
from layerparity.models.header import Stored

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
        result.block = fp8.block_of(config)
    except UserError as error:
        _add(result, "quantization_unread", str(error))
    except (AttributeError, TypeError, ValueError):
        _add(result, "quantization_unread", "config.json's quantization_config cannot be read")
    for stored in tensors.values():
        if fp8.is_scale(stored.name):
            _scale(result, stored, tensors, lost)
        elif stored.dtype in _EIGHT_BIT_FLOATS:
            _weight(result, stored, tensors, lost)
    if result.weights and config and config.get("quantization_config") is None:
        text = f"{result.weights} weights are FP8 and config.json has no quantization_config"
        _add(result, "quantization_unsaid", text)
    return result


def _weight(result: Scales, stored: Stored, tensors: Mapping[str, Stored], lost: set[str]) -> None:
    result.weights += 1
    name = fp8.scale_name(stored.name)
    scales = tensors.get(name)
    if scales is None:
        if name not in lost:
            _add(result, "scale_missing", f"{stored.name} is FP8 without {name}", stored)
        return
    result.present += 1
    if len(stored.shape) < 2:
        _add(result, "scale_shape", f"{stored.name} has one axis: it has no blocks", stored)
        return
    due = fp8.scale_shape(stored.shape, result.block)
    if scales.shape != due:
        text = (
            f"{name} has the shape {list(scales.shape)}; {list(stored.shape)} in blocks of "
            f"{list(result.block)} wants {list(due)}"
        )
        _add(result, "scale_shape", text, scales)
    elif scales.dtype not in _READ:
        _add(result, "scale_type", f"{name} is stored as {scales.dtype}", scales)
    elif stored.dtype in fp8.STORED:
        result.matching.add(stored.name)


def _scale(result: Scales, stored: Stored, tensors: Mapping[str, Stored], lost: set[str]) -> None:
    name = fp8.weight_name(stored.name)
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
