"""Find weights whose standard deviation is unlike that of their family.

What is compared is the logarithm of the standard deviation: first of an expert with the other
experts of its layer, then of a layer (the median of its experts) with the other layers. z is
robust: the distance from the median over the median absolute deviation, times 0.6745 (Iglewicz and
Hoaglin 1993).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layerparity.checkpoint.sizes import layer_of
from layerparity.checkpoint.stream import ValueStatistics
from layerparity.model.packing import is_scale

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


def stds_by_layer(
    statistics_by_name: Mapping[str, ValueStatistics],
) -> dict[str, dict[int, dict[str, float]]]:
    """Return the standard deviations of weights by family, layer and name.

    Scales, constant and broken tensors have none.
    """
    stds: dict[str, dict[int, dict[str, float]]] = {}
    for name, one in statistics_by_name.items():
        layer = layer_of(name)
        spread = 0 < one.std < math.inf
        if layer is None or is_scale(name) or not spread or one.nan or one.inf:
            continue
        family = ".".join(family_of(name))
        stds.setdefault(family, {}).setdefault(layer, {})[name] = one.std
    return stds


def outliers(families: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Iterator[Outlier]:
    """Yield what is out of its family, experts first."""
    for family, layers in families.items():
        for members in layers.values():
            yield from _unlike(members, "other experts of its layer")
        middles = {layer: statistics.median(members.values()) for layer, members in layers.items()}
        named = {}
        for layer, std in middles.items():
            alone = len(layers[layer]) == 1
            name = next(iter(layers[layer])) if alone else family.replace("*", str(layer), 1)
            named[name] = std
        yield from _unlike(named, "same tensor of other layers")


def layer_medians(
    families: Mapping[str, Mapping[int, Mapping[str, float]]],
) -> Iterator[tuple[str, int, float]]:
    """Yield family, layer and the median standard deviation there."""
    for family, layers in families.items():
        for layer, members in layers.items():
            yield family, layer, statistics.median(members.values())


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
