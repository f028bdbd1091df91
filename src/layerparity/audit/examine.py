"""Examine: a checkpoint from its headers, and with ``deep`` from every number it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerparity.audit.architecture import Fit, fit, import_libraries
from layerparity.audit.deep import Deep, read_deep
from layerparity.audit.finding import Finding
from layerparity.audit.listing import Listing, read_listing
from layerparity.audit.peak import Peak, peaks
from layerparity.audit.scales import Scales, check_scales
from layerparity.audit.sizes import Sizes, measure
from layerparity.errors import Exit, UserError
from layerparity.models.checkpoint import INDEX, Checkpoint

OK = "ok"
PROBLEMS = "problems"
SCHEMA = 1


@dataclass
class Audit:
    """What was found of a checkpoint; ``peaks`` are by the type of a naive conversion's buffers.

    ``seconds`` are of the headers alone, after the libraries are imported.
    """

    folder: Path
    model_type: str
    files: int
    sizes: Sizes
    scales: Scales
    peaks: dict[str, Peak]
    parameters: int
    findings: list[Finding]
    seconds: float
    deep: Deep | None = None

    @property
    def problems(self) -> list[Finding]:
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
            "scales": self.scales.to_dict(),
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
    read, said = _config(checkpoint)
    config = read or {}
    import_libraries(config)
    began = time.perf_counter()
    listing = read_listing(folder)
    fitted = Fit() if read is None else fit(config, listing.tensors, listing.lost)
    scales = check_scales(config, listing.tensors, listing.lost)
    audit = Audit(
        folder,
        str(config.get("model_type", "")),
        len(listing.shards),
        measure(listing.tensors, fitted.buffers),
        scales,
        peaks(fitted, listing.tensors),
        fitted.parameters,
        [*said, *listing.findings, *fitted.findings, *scales.findings],
        time.perf_counter() - began,
    )
    return _deepened(audit, listing) if deep else audit


def _config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    try:
        return checkpoint.config, []
    except UserError as error:
        return None, [Finding("config_damaged", str(error), file="config.json", count=0)]


def _deepened(audit: Audit, listing: Listing) -> Audit:
    audit.deep = read_deep(listing, audit.scales)
    audit.findings = [*audit.findings, *audit.deep.findings]
    return audit
