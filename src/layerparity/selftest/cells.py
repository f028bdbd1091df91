"""Cells: what a self-test runs, as data: each fault at each layer, each clean way on each input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.mistakes.catalogue import MUTATION, known_fault

if TYPE_CHECKING:
    import torch

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


def fault_cells(
    settings: Sequence[Setting], layers: dict[str, int], names: Sequence[str]
) -> Iterator[Cell]:
    """Yield each fault in the first, the middle and the last block of every setting's model.

    ``layers`` counts the blocks of each model. The model in FP8 is there for the faults that only
    such a checkpoint can have: for the others it is the shipped one.
    """
    for name in names:
        fault = known_fault(name)
        for setting in settings:
            if fault.quantised != (setting.model == FP8):
                continue
            for layer in spread(range(layers[setting.model])):
                keys = {"port": "fault", "port.name": name, "port.layers": [layer]}
                yield Cell(setting, name, keys, layer, fault.component, fault.cause)


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


FP8 = "tiny_minimax_m2_fp8"
# Small enough that a small matrix has several blocks, some of them cut off.
BLOCK = 40
_QUANTISED = re.compile(r"(_proj|\.experts\.\d+\.w[123])\.weight$")
_WEIGHTS = "model.safetensors"


def make_fp8(source: Path, folder: Path) -> Path:
    """Write the checkpoint ``source``, of one file, to a new folder with its projections in FP8."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != _WEIGHTS:
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    made: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / _WEIGHTS).items():
        made[name] = value
        if _QUANTISED.search(name):
            made[name], made[f"{name}_scale_inv"] = quantise(value)
    save_file(made, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix [row, column] as e4m3, and its float32 scales [block row, block column].

    Each block's largest number becomes the type's largest.
    """
    import torch

    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // BLOCK) for size in weight.shape])
    for row, rows in enumerate(weight.float().split(BLOCK)):
        for column, part in enumerate(rows.split(BLOCK, 1)):
            scale = part.abs().max().clamp(min=1e-12) / torch.finfo(stored.dtype).max
            scales[row, column] = scale
            place = stored[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            place.copy_((part / scale).to(stored.dtype))
    return stored, scales
