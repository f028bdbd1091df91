"""FP8: a checkpoint stored again as published ones are, e4m3 with a scale for each block."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
