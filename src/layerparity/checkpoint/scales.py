"""Check FP8 weights and their scales against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity.checkpoint.finding import AuditFinding
from layerparity.ground.errors import UserError
from layerparity.model import weight_types
from layerparity.model.header import Stored

_EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2")


@dataclass
class ScaleCheck:
    """How many weights are FP8, how many of them have scales, and of the right shape.

    ``matching`` holds the names of the weights that can be dequantised; ``block`` is the rows and
    columns that one scale serves.
    """

    block: tuple[int, int] = weight_types.USUAL_BLOCK
    weights: int = 0
    present: int = 0
    matching: set[str] = field(default_factory=set)
    orphans: int = 0
    findings: list[AuditFinding] = field(default_factory=list)

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
) -> ScaleCheck:
    """Compare FP8 weights with their scales; nothing is said of the names in ``lost``."""
    result = ScaleCheck()
    try:
        result.block = weight_types.block_of(config)
    except UserError as error:
        _add(result, "quantization_unread", str(error))
    except (AttributeError, TypeError, ValueError):
        _add(result, "quantization_unread", "config.json's quantization_config cannot be read")
    for stored in tensors.values():
        if weight_types.is_scale(stored.name):
            name = weight_types.weight_name(stored.name)
            weight = tensors.get(name)
            is_lost = weight is None and name in lost
            if not is_lost and (weight is None or weight.dtype not in _EIGHT_BIT_FLOATS):
                result.orphans += 1
                what = f"{name} is {weight.dtype}" if weight else f"no {name}"
                _add(result, "scale_orphan", f"{stored.name} is there, and {what}", stored)
        elif stored.dtype in _EIGHT_BIT_FLOATS:
            _weight(result, stored, tensors, lost)
    if result.weights and config and config.get("quantization_config") is None:
        text = f"{result.weights} weights are FP8 and config.json has no quantization_config"
        _add(result, "quantization_unsaid", text)
    return result


def _weight(
    result: ScaleCheck, stored: Stored, tensors: Mapping[str, Stored], lost: set[str]
) -> None:
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
    elif scales.dtype not in weight_types.SCALES:
        _add(result, "scale_type", f"{name} is stored as {scales.dtype}", scales)
    elif stored.dtype in weight_types.STORED:
        result.matching.add(stored.name)


def _add(result: ScaleCheck, what: str, text: str, stored: Stored | None = None) -> None:
    tensor, file = (stored.name, stored.file.name) if stored else ("", "config.json")
    count = 1 if stored else 0
    result.findings.append(AuditFinding(what, text, tensor, file, count))
