"""Deep: what reading every weight finds: NaN, Inf, all zero, constant, out of its family."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity import console
from layerparity.audit import family
from layerparity.audit.architecture import READ
from layerparity.audit.finding import Finding
from layerparity.audit.listing import Listing
from layerparity.audit.scales import Scales
from layerparity.audit.stream import stream
from layerparity.audit.tally import Tally
from layerparity.models import fp8
from layerparity.models.header import Stored


@dataclass
class Deep:
    """Tensors read, bytes of them, seconds, findings; standard deviations by family and layer."""

    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    stds: list[tuple[str, int, float]] = field(default_factory=list)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without what has a file of its own."""
        return {"tensors": self.tensors, "bytes": self.bytes, "seconds": round(self.seconds, 3)}


def read_deep(listing: Listing, scales: Scales) -> Deep:
    """Read every tensor once, in bounded memory, with a progress bar."""
    began = time.perf_counter()
    with console.progress("tensors", len(listing.tensors)) as bar:
        tallies, failed = stream(listing, scales.matching, scales.block, bar)
    families = family.by_layer(_comparable(tallies, listing.tensors, scales))
    findings = [*failed, *_broken(tallies, listing.tensors), *_flat(tallies, listing.tensors)]
    findings += _scales(tallies, listing.tensors)
    findings += [_outlier(each, listing.tensors) for each in family.outliers(families)]
    return Deep(
        len(tallies),
        sum(listing.tensors[name].bytes for name in tallies),
        time.perf_counter() - began,
        findings,
        list(family.layer_medians(families)),
        {name: tally.to_dict() for name, tally in tallies.items()},
    )


def _comparable(
    tallies: Mapping[str, Tally], tensors: Mapping[str, Stored], scales: Scales
) -> dict[str, Tally]:
    """Leave out what is no weight by its type, and FP8 weights whose scales were not applied."""
    return {
        name: tally
        for name, tally in tallies.items()
        if (dtype := tensors[name].dtype) in READ
        and (dtype not in fp8.STORED or name in scales.matching)
    }


def _broken(tallies: Mapping[str, Tally], tensors: Mapping[str, Stored]) -> Iterator[Finding]:
    for name, tally in tallies.items():
        if tally.nan or tally.inf:
            text = f"{name} holds {tally.nan} NaN and {tally.inf} Inf"
            yield Finding("nonfinite", text, name, tensors[name].file.name)


def _flat(tallies: Mapping[str, Tally], tensors: Mapping[str, Stored]) -> Iterator[Finding]:
    """Yield weights of one value.

    A vector that is flat in most layers may be meant so (a norm of ones, a bias that is not used):
    a note. One that is not flat elsewhere, or a matrix, is a problem.
    """
    flat: dict[tuple[str, ...], list[str]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for name, tally in tallies.items():
        kind = family.family_of(name)
        sizes[kind] = sizes.get(kind, 0) + 1
        if tally.constant and not fp8.is_scale(name):
            flat.setdefault(kind, []).append(name)
    for kind, names in flat.items():
        for name in names:
            stored = tensors[name]
            usual = len(names) * 2 > sizes[kind] and len(stored.shape) < 2
            value = tallies[name].least
            what, text = ("all_zero", "all zero") if value == 0 else ("constant", f"all {value:g}")
            file = stored.file.name
            yield Finding(what, f"{name} is {text}", name, file, note=usual)


def _scales(tallies: Mapping[str, Tally], tensors: Mapping[str, Stored]) -> Iterator[Finding]:
    """Yield scales that are not above 0; a note where some blocks are 0, which may be meant so."""
    for name, tally in tallies.items():
        if fp8.is_scale(name) and tally.count and tally.least <= 0:
            some = tally.least == 0 and tally.most > 0
            text = f"{name} holds scales from {tally.least:g} to {tally.most:g}"
            yield Finding("scale_value", text, name, tensors[name].file.name, note=some)


def _outlier(found: family.Outlier, tensors: Mapping[str, Stored]) -> Finding:
    file = tensors[found.name].file.name if found.name in tensors else ""
    light = found.factor < family.GRAVE_FACTOR
    return Finding("out_of_family", found.text, found.name, file, note=light)
