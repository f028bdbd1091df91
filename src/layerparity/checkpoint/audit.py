"""Audit a checkpoint from its headers, and with ``deep`` from every number it holds."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from layerparity.checkpoint.deep import DeepAudit, read_deep
from layerparity.checkpoint.finding import AuditFinding
from layerparity.checkpoint.fit import Fit, fit, import_libraries
from layerparity.checkpoint.listing import Listing, read_listing
from layerparity.checkpoint.scales import PackingCheck, check_packing
from layerparity.checkpoint.sizes import CheckpointSizes, measure
from layerparity.ground.errors import Exit, UserError
from layerparity.model.checkpoint import INDEX, Checkpoint
from layerparity.model.contradiction import contradiction
from layerparity.model.header import Stored
from layerparity.model.packed import PackedWeight
from layerparity.model.packing import is_scale, weights_of

OK = "ok"
PROBLEMS = "problems"
SCHEMA = 1
# Bytes of a number in the buffers of a naive conversion.
_BUFFER_TYPES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Peak:
    """Bytes held at the worst moment of a naive conversion with buffers of one type.

    The naive way reads the whole state dict, widens packed weights to bfloat16, and copies the
    experts into one buffer for each stacked weight while it still holds what they came from. With
    float32 buffers a model of 457 GB then wants more than a terabyte.

    ``sources`` is the state dict, ``stacked`` all buffers, ``weight`` the stacked weight that is
    being filled then (empty: none is stacked); ``largest`` the largest buffer and ``buffer`` its
    bytes. ``streaming`` is what the largest two stages in a row take, which is enough: one that
    computes and one that is being read.
    """

    bytes: int
    sources: int
    stacked: int
    weight: str
    largest: str
    buffer: int
    streaming: int


@dataclass
class Audit:
    """What was found of a checkpoint; ``peaks`` are by the type of a naive conversion's buffers.

    ``seconds`` are of the headers alone, after the libraries are imported.
    """

    folder: Path
    model_type: str
    files: int
    sizes: CheckpointSizes
    packing: PackingCheck
    peaks: dict[str, Peak]
    parameters: int
    findings: list[AuditFinding]
    seconds: float
    deep: DeepAudit | None = None

    @property
    def problems(self) -> list[AuditFinding]:
        """The findings that make it unsound."""
        return [each for each in self.findings if not each.note]

    @property
    def verdict(self) -> str:
        """``ok`` or ``problems``."""
        return PROBLEMS if self.problems else OK

    @property
    def exit(self) -> Exit:
        """Exit status: 1 where there is a problem."""
        return Exit.FAILED if self.problems else Exit.OK

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "model_type": self.model_type,
            "verdict": self.verdict,
            "problems": len(self.problems),
            "files": self.files,
            "seconds": round(self.seconds, 3),
            "architecture_parameters": self.parameters,
            **self.sizes.to_dict(),
            "packed": self.packing.to_dict(),
            "peaks": {name: asdict(peak) for name, peak in self.peaks.items()},
            "deep": self.deep.to_dict() if self.deep else None,
            "findings": [each.to_dict() for each in self.findings],
        }

    def to_json(self) -> str:
        """Return the audit as JSON text."""
        return json.dumps(self.to_dict(), indent=1)


def examine(checkpoint: Checkpoint, deep: bool = False) -> Audit:
    """Return the audit of a checkpoint. Its damage is listed, and raises nothing.

    Raises UserError where the folder holds no safetensors at all.
    """
    folder = checkpoint.folder
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        _ = checkpoint.tensors
    began = time.perf_counter()
    listing = read_listing(folder)
    config, damaged = _config_of(checkpoint, listing)
    read = time.perf_counter() - began
    if not damaged:
        import_libraries(config)
    began = time.perf_counter()
    packing = check_packing(config, listing.tensors, listing.lost)
    tensors = packing.unpacked.tensors
    fitted = Fit() if damaged else fit(config, tensors, weights_of(listing.lost))
    # That numbers without their scales are not read is said once.
    said = packing.unpacked.faults.keys() | packing.unpacked.unjudged
    unfit = [e for e in fitted.findings if e.what != "type_unread" or e.tensor not in said]
    audit = Audit(
        folder,
        str(config.get("model_type", "")),
        len(listing.shards),
        measure(tensors, fitted.buffers, fitted.copies),
        packing,
        peaks(fitted, tensors),
        fitted.parameters,
        [*damaged, *listing.findings, *unfit, *packing.findings],
        read + time.perf_counter() - began,
    )
    if deep:
        audit.deep = read_deep(listing, packing.unpacked)
        audit.findings += audit.deep.findings
    return audit


def _config_of(
    checkpoint: Checkpoint, listing: Listing
) -> tuple[Mapping[str, Any], list[AuditFinding]]:
    """Return config.json's values, and why nothing is built of them, not even a configuration."""
    try:
        config = checkpoint.written
    except UserError as error:
        return {}, [AuditFinding("config_damaged", str(error), file="config.json", count=0)]
    found = contradiction(config, listing.tensors, len(listing.lost))
    text = f"config.json has {found}: they are not of one model"
    damaged = AuditFinding("config_damaged", text, file="config.json", count=0)
    return config, [damaged] if found else []


def peaks(fitted: Fit, tensors: Mapping[str, Stored]) -> dict[str, Peak]:
    """Return the peak by type of the buffers; empty where the architecture is not known."""
    if not fitted.weights:
        return {}
    stacks = [weight for weight in fitted.weights if weight.pieces > 1]
    # The state dict: as stored, packed weights in bfloat16 and without their scales.
    sources = sum(
        math.prod(each.shape) * _BUFFER_TYPES["bf16"]
        if isinstance(each, PackedWeight)
        else each.bytes
        for each in tensors.values()
        if not is_scale(each.name)
    )
    in_a_row = max((left + right for left, right in pairwise(fitted.stages.values())), default=0)
    by_type = {}
    for name, item in _BUFFER_TYPES.items():
        stacked = sum(weight.numbers for weight in stacks) * item
        largest = max(stacks, key=lambda weight: weight.numbers, default=None)
        by_type[name] = Peak(
            bytes=sources + stacked,
            sources=sources,
            stacked=stacked,
            weight=stacks[-1].name if stacks else "",
            largest=largest.name if largest else "",
            buffer=largest.numbers * item if largest else 0,
            streaming=in_a_row * item,
        )
    return by_type
