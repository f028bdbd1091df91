"""Deep: what reading every weight finds: NaN, Inf, all zero, constant, out of its family.

What is held against each other is the logarithm of the standard deviation: first of an expert
against the other experts of its layer, then of a layer (the median of its experts) against the
other layers. z is robust: the distance from the median over the median absolute deviation, times
0.6745 (Iglewicz and Hoaglin 1993).
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layerparity.checkpoint.architecture import READ
from layerparity.checkpoint.finding import Finding
from layerparity.checkpoint.listing import Listing
from layerparity.checkpoint.sizes import Scales, layer_of
from layerparity.checkpoint.stream import Tally, stream
from layerparity.ground import console
from layerparity.model import weight_types
from layerparity.model.header import Stored


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
    families = by_layer(_comparable(tallies, listing.tensors, scales))
    findings = [*failed, *_broken(tallies, listing.tensors), *_flat(tallies, listing.tensors)]
    findings += _scales(tallies, listing.tensors)
    findings += [_outlier(each, listing.tensors) for each in outliers(families)]
    return Deep(
        len(tallies),
        sum(listing.tensors[name].bytes for name in tallies),
        time.perf_counter() - began,
        findings,
        list(layer_medians(families)),
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
        and (dtype not in weight_types.STORED or name in scales.matching)
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
        kind = family_of(name)
        sizes[kind] = sizes.get(kind, 0) + 1
        if tally.constant and not weight_types.is_scale(name):
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
        if weight_types.is_scale(name) and tally.count and tally.least <= 0:
            some = tally.least == 0 and tally.most > 0
            text = f"{name} holds scales from {tally.least:g} to {tally.most:g}"
            yield Finding("scale_value", text, name, tensors[name].file.name, note=some)


def _outlier(found: Outlier, tensors: Mapping[str, Stored]) -> Finding:
    file = tensors[found.name].file.name if found.name in tensors else ""
    light = found.factor < GRAVE_FACTOR
    return Finding("out_of_family", found.text, found.name, file, note=light)


# Trained layers differ by depth: both limits must be passed, and only a large factor is a problem.
Z_LIMIT = 8.0
FACTOR = 2.0
GRAVE_FACTOR = 4.0
FEWEST = 5
# Experts initialised alike differ by less than any limit should be measured in.
_LEAST_SPREAD = 0.02
_NORMAL = 0.6745
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Outlier:
    """A tensor, or a layer's experts, unlike its family: standard deviations and robust z."""

    name: str
    among: str
    std: float
    usual: float
    z: float

    @property
    def factor(self) -> float:
        """How many times larger, or smaller, than usual; at least 1."""
        ratio = self.std / self.usual
        return max(ratio, 1 / ratio)

    @property
    def text(self) -> str:
        """The outlier in one line."""
        return (
            f"{self.name} has a standard deviation of {self.std:.3g}, the {self.among} "
            f"{self.usual:.3g} (robust z {self.z:+.0f})"
        )


def family_of(name: str) -> tuple[str, ...]:
    """Return a name with its numbers taken out: equal for the same tensor of other layers."""
    return tuple(_NUMBER.sub("*", name).split("."))


def by_layer(tallies: Mapping[str, Tally]) -> dict[str, dict[int, dict[str, float]]]:
    """Return the standard deviations of weights by family, layer and name.

    Scales, constant and broken tensors have none.
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, tally in tallies.items():
        layer = layer_of(name)
        spread = 0 < tally.std < math.inf
        if layer is None or weight_types.is_scale(name) or not spread or tally.nan or tally.inf:
            continue
        family = ".".join(family_of(name))
        found.setdefault(family, {}).setdefault(layer, {})[name] = tally.std
    return found


def outliers(families: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Iterator[Outlier]:
    """Yield what is out of its family, experts first."""
    for family, layers in families.items():
        for members in layers.values():
            yield from _unlike(members, "other experts of its layer")
        middles = {layer: statistics.median(held.values()) for layer, held in layers.items()}
        named = {_layer_name(family, layers, layer): std for layer, std in middles.items()}
        yield from _unlike(named, "same tensor of other layers")


def layer_medians(
    families: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> Iterator[tuple[str, int, float]]:
    """Yield family, layer and the median standard deviation there."""
    for family, layers in families.items():
        for layer, members in layers.items():
            yield family, layer, statistics.median(members.values())


def _layer_name(family: str, layers: Mapping[int, Mapping[str, float]], layer: int) -> str:
    members = layers[layer]
    if len(members) == 1:
        return next(iter(members))
    return family.replace("*", str(layer), 1)


def _unlike(stds: Mapping[str, float], among: str) -> Iterator[Outlier]:
    if len(stds) < FEWEST:
        return
    logs = {name: math.log(std) for name, std in stds.items()}
    middle = statistics.median(logs.values())
    spread = statistics.median(abs(value - middle) for value in logs.values())
    for name, value in logs.items():
        z = _NORMAL * (value - middle) / max(spread, _LEAST_SPREAD)
        if abs(z) > Z_LIMIT and abs(value - middle) > math.log(FACTOR):
            yield Outlier(name, among, stds[name], math.exp(middle), z)
