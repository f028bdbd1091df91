"""Grid: the cells of a self-test: every fault where it may apply, and clean candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerparity import registry
from layerparity.selftest.cells import Cell, Setting, spread
from layerparity.selftest.fp8 import FP8

MUTATION = "mutation"


def fault_cells(
    settings: Sequence[Setting], layers: dict[str, int], names: Sequence[str]
) -> Iterator[Cell]:
    """Yield each fault in the first, the middle and the last block of every setting's model.

    ``layers`` counts the blocks of each model. The model in FP8 is there for the faults that only
    such a checkpoint can have: for the others it is the shipped one.
    """
    for name in names:
        fault = registry.load("faults", name).FAULT
        for setting in settings:
            if fault.quantised != (setting.model == FP8):
                continue
            for layer in spread(range(layers[setting.model])):
                keys = {"port": "fault", "port.name": name, "port.layers": [layer]}
                yield Cell(setting, name, keys, layer, fault.component, fault.cause)


def fault_names() -> list[str]:
    """Return the faults of the catalogue."""
    return [name for name in registry.names("faults") if name != MUTATION]


def clean_cells(settings: Sequence[Setting], ways: Sequence[str]) -> Iterator[Cell]:
    """Yield every setting computed in every clean way that no floor is made from."""
    for setting in settings:
        for way in ways:
            yield Cell(setting, way, {"port": "clean", "port.name": way})
        if setting.dtype == "float32":
            yield Cell(setting, "bfloat16 for float32", {"dtype": "bfloat16"})


def mutation_cells(
    settings: Sequence[Setting],
    drawn: Mapping[str, Sequence[Any]],
    seed: int,
    layers: dict[str, int],
) -> Iterator[Cell]:
    """Yield each drawn mutation of each setting's model, the layers in turn."""
    for setting in settings:
        for index, mutation in enumerate(drawn[setting.model]):
            layer = index % layers[setting.model]
            keys = {
                "port": "fault",
                "port.name": MUTATION,
                "port.seed": seed,
                "port.index": index,
                "port.layers": [layer],
                # The prefill shows them: a decode step would only take longer.
                "generate.max_new_tokens": 0,
            }
            yield Cell(setting, mutation.id, keys, layer, mutation.component, drawn=True)
