"""Cells: what a self-test runs, as data: each fault at each layer, each clean way on each input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Keys = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A model, an input and a floating type: what one golden run is made for."""

    model: str
    inputs: str
    dtype: str
    keys: Keys = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The setting in a few words."""
        return f"{self.model} {self.dtype}, {self.inputs}"


@dataclass(frozen=True)
class Cell:
    """One candidate: a setting, the port's keys, and what should be said of it.

    ``component`` is empty for a clean candidate, ``layer`` None. ``drawn`` marks a fault that no
    rule was written for.
    """

    setting: Setting
    name: str
    keys: Keys
    layer: int | None = None
    component: str = ""
    cause: str = ""
    drawn: bool = False

    @property
    def called(self) -> str:
        """The candidate in a few words."""
        return self.name if self.layer is None else f"{self.name} at layer {self.layer}"

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong with the candidate."""
        return self.layer is None


def spread(layers: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last of some layers."""
    picked = [layers[0], layers[len(layers) // 2], layers[-1]] if layers else []
    return list(dict.fromkeys(picked))
