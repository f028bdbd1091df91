"""Read every weight for what headers cannot show: NaN, Inf, all zero, constant, out of family."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity.checkpoint.finding import AuditFinding
from layerparity.checkpoint.fit import READ
from layerparity.checkpoint.listing import Listing
from layerparity.checkpoint.outliers import (
    GRAVE_FACTOR,
    family_of,
    layer_medians,
    outliers,
    stds_by_layer,
)
from layerparity.checkpoint.stream import ValueStatistics, stream
from layerparity.ground import progress
from layerparity.model.header import Stored
from layerparity.model.packed import SCALES, PackedWeight
from layerparity.model.packing import Unpacked, is_scale
from layerparity.model.packing_format import SCALE_TYPES


@dataclass
class DeepAudit:
    """Tensors read, bytes of them, seconds, findings; standard deviations by family and layer."""

    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    findings: list[AuditFinding] = field(default_factory=list)
    stds: list[tuple[str, int, float]] = field(default_factory=list)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without what has a file of its own."""
        return {"tensors": self.tensors, "bytes": self.bytes, "seconds": round(self.seconds, 3)}


def read_deep(listing: Listing, unpacked: Unpacked) -> DeepAudit:
    """Read every tensor once, in bounded memory, with a progress bar."""
    began = time.perf_counter()
    scales = [part for each in unpacked.packed.values() for part in _scales_of(each)]
    tensors = {**{each.name: each for each in scales}, **unpacked.tensors}
    with progress.shown("tensors", len(tensors)) as bar:
        tallies, failed = stream(tensors, listing.sizes, bar)
    read = [unpacked.tensors[name] for name in tallies if name in unpacked.tensors]
    # Not what is no weight by its type, nor numbers whose scales were not applied.
    weights = {
        name: tally
        for name, tally in tallies.items()
        if isinstance(tensors[name], PackedWeight) or tensors[name].dtype in READ
    }
    families = stds_by_layer(weights)
    findings = [*failed, *_odd_values(tallies, tensors)]
    for each in outliers(families):
        # A layer's experts have no file of their own.
        stored = tensors.get(each.name)
        file, light = stored.file.name if stored else "", each.factor < GRAVE_FACTOR
        findings.append(AuditFinding("out_of_family", each.text, each.name, file, note=light))
    return DeepAudit(
        sum(len(each.parts) if isinstance(each, PackedWeight) else 1 for each in read),
        sum(each.bytes for each in read),
        time.perf_counter() - began,
        findings,
        list(layer_medians(families)),
        {name: tally.to_dict() for name, tally in tallies.items()},
    )


def _scales_of(weight: PackedWeight) -> Iterator[Stored]:
    """Yield the scales of a weight whose values say something by themselves."""
    part = weight.parts[SCALES]
    if part.dtype in SCALE_TYPES:
        yield part


def _odd_values(
    tallies: Mapping[str, ValueStatistics], tensors: Mapping[str, Stored]
) -> Iterator[AuditFinding]:
    """Yield what a tensor's own values show: NaN and Inf, weights of one value, useless scales."""
    for name, tally in tallies.items():
        if tally.nan or tally.inf:
            text = f"{name} holds {tally.nan} NaN and {tally.inf} Inf"
            yield AuditFinding("nonfinite", text, name, tensors[name].file.name)
    yield from _flat(tallies, tensors)
    for name, tally in tallies.items():
        if is_scale(name) and tally.count and tally.least <= 0:
            # Some blocks of 0 may be meant so.
            some = tally.least == 0 and tally.most > 0
            text = f"{name} holds scales from {tally.least:g} to {tally.most:g}"
            yield AuditFinding("scale_value", text, name, tensors[name].file.name, note=some)


def _flat(
    tallies: Mapping[str, ValueStatistics], tensors: Mapping[str, Stored]
) -> Iterator[AuditFinding]:
    """Yield weights of one value.

    A vector that is flat in most layers may be meant so (a norm of ones, a bias that is not used):
    a note. One that is not flat elsewhere, or a matrix, is a problem.
    """
    flat: dict[tuple[str, ...], list[str]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for name, tally in tallies.items():
        kind = family_of(name)
        sizes[kind] = sizes.get(kind, 0) + 1
        if tally.constant and not is_scale(name):
            flat.setdefault(kind, []).append(name)
    for kind, names in flat.items():
        for name in names:
            stored = tensors[name]
            usual = len(names) * 2 > sizes[kind] and len(stored.shape) < 2
            value = tallies[name].least
            what, text = ("all_zero", "all zero") if value == 0 else ("constant", f"all {value:g}")
            file = stored.file.name
            yield AuditFinding(what, f"{name} is {text}", name, file, note=usual)
