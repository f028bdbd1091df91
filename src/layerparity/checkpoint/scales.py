"""Count a checkpoint's packed weights, and list what is wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity.checkpoint.finding import AuditFinding
from layerparity.ground.errors import UserError
from layerparity.model.header import Stored
from layerparity.model.packing import QUANTIZATION, PackingFault, Unpacked, unpack

_ORPHAN = "scale_orphan"


@dataclass
class PackingCheck:
    """A checkpoint's tensors with packed weights put together, and how they fared.

    ``kinds`` counts the weights that can be read, by format.
    """

    unpacked: Unpacked
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[AuditFinding] = field(default_factory=list)

    @property
    def orphans(self) -> int:
        """How many scales belong to no weight."""
        return sum(each.what == _ORPHAN for each in self.unpacked.faults.values())

    @property
    def faulty(self) -> int:
        """How many weights cannot be read."""
        return len(self.unpacked.faults) - self.orphans

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"weights": dict(self.kinds), "faulty": self.faulty, "orphans": self.orphans}


def check_packing(
    config: Mapping[str, Any], tensors: Mapping[str, Stored], lost: set[str]
) -> PackingCheck:
    """Put packed weights together; nothing is said of the names in ``lost``."""
    try:
        result = PackingCheck(unpack(config, tensors, lost))
    except UserError as error:
        # What the tensors themselves say is said.
        result = PackingCheck(unpack({}, tensors, lost))
        result.findings.append(_finding("quantization_unread", str(error)))
    packed = result.unpacked.packed.values()
    result.kinds.update(each.dtype for each in packed)
    result.findings += [_of_fault(each) for each in result.unpacked.faults.values()]
    floats = sum(each.dtype.startswith("F8") for each in packed)
    if floats and config and config.get(QUANTIZATION) is None:
        text = f"{floats} weights are FP8 and config.json has no quantization_config"
        result.findings.append(_finding("quantization_unsaid", text))
    return result


def _of_fault(fault: PackingFault) -> AuditFinding:
    return _finding(fault.what, fault.text, fault.tensor)


def _finding(what: str, text: str, stored: Stored | None = None) -> AuditFinding:
    tensor, file = (stored.name, stored.file.name) if stored else ("", "config.json")
    return AuditFinding(what, text, tensor, file, 1 if stored else 0)
