"""The cells of a self-test: each fault at each layer, each clean way on each input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Place
from layerparity.mistakes.catalogue import WRONG_OUTPUT, known_fault
from layerparity.numbers.pieces import FP8 as STORED
from layerparity.selftest.models import FP8

if TYPE_CHECKING:
    from layerparity.ports.base import Assets, Port

Keys = dict[str, Any]
Modules = dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class Setting:
    """A model, an input and a floating type: what one golden run is made for.

    Some models cannot decode: their blocks keep no keys and values. Then it is a prefill alone.
    ``chained`` says that each block of a candidate is fed the block before it.
    """

    model: str
    inputs: str
    dtype: str
    keys: Keys = field(default_factory=dict)
    decodes: bool = True
    chained: bool = False

    @property
    def label(self) -> str:
        """The setting in a few words."""
        return f"{self.model} {self.dtype}, {self.fed}"

    @property
    def fed(self) -> str:
        """What its candidates are fed, and how."""
        return f"{self.inputs}, chained" if self.chained else self.inputs


@dataclass(frozen=True)
class GridCell:
    """One candidate: a setting, the port's keys, and what should be said of it.

    ``layer`` is None outside the blocks; of a clean candidate, ``component`` is empty as well.
    ``drawn`` marks a fault that no rule was written for; ``port_of`` makes its port, where the keys
    cannot name that.
    """

    setting: Setting
    name: str
    keys: Keys
    layer: int | None = None
    component: str = ""
    cause: str = ""
    drawn: bool = False
    port_of: Callable[[Assets], Port] | None = None

    @property
    def called(self) -> str:
        """The candidate in a few words."""
        return self.name if self.layer is None else f"{self.name} at layer {self.layer}"

    @property
    def place(self) -> Place:
        """The first module that is wrong; of a clean candidate, none."""
        return Place(self.layer, self.component)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong with the candidate."""
        return self.layer is None and not self.component


def spread(layers: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last of some layers."""
    picked = [layers[0], layers[len(layers) // 2], layers[-1]] if layers else []
    return list(dict.fromkeys(picked))


def fault_cells(
    settings: Sequence[Setting], layers: dict[str, int], names: Sequence[str]
) -> Iterator[GridCell]:
    """Yield each fault in the first, the middle and the last block of every setting's model.

    One outside the blocks has one place.
    ``layers`` counts the blocks of each model. The model in FP8 is there for the faults that only
    such a checkpoint can have: for the others it is the shipped one.
    """
    for name in names:
        fault = known_fault(name)
        for setting in settings:
            if fault.of_inputs or (fault.quantised and STORED not in fault.quantised):
                # No model of the grid is packed so.
                continue
            if bool(fault.quantised) != (setting.model == FP8):
                continue
            for place in fault.places(spread(range(layers[setting.model]))):
                keys: Keys = {"port": "fault", "port.name": name}
                if place.layer is not None:
                    keys["port.layers"] = [place.layer]
                yield GridCell(setting, name, keys, place.layer, fault.component, fault.cause)


def module_cells(settings: Sequence[Setting], modules: dict[str, Modules]) -> Iterator[GridCell]:
    """Yield every module of a block of each kind, its output made wrong, for every setting.

    ``modules`` holds, by model, the modules of one block of each kind, by layer.
    """
    for setting in settings:
        for layer, paths in modules[setting.model].items():
            for path in paths:
                keys = {"port": "fault", "port.name": WRONG_OUTPUT, "port.module": path}
                place = {"port.layers": [layer]}
                yield GridCell(setting, path, {**keys, **place}, layer, path, drawn=True)


def clean_cells(settings: Sequence[Setting], ways: Sequence[str]) -> Iterator[GridCell]:
    """Yield every setting computed in every clean way that no floor is made from."""
    for setting in settings:
        for way in ways:
            yield GridCell(setting, way, {"port": "clean", "port.name": way})
        if setting.dtype == "float32":
            yield GridCell(setting, "bfloat16 for float32", {"dtype": "bfloat16"})
