"""A small real FP8 checkpoint, made of a folder in a wider type as published ones are made."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
_QUANTISED = re.compile(r"(_proj|\.experts\.\d+\.w[123])\.weight$")
# The published MiniMax-M2 keeps its router in float32.
_FLOAT32 = re.compile(r"(block_sparse_moe\.gate\.weight|e_score_correction_bias)$")
_INDEX = "model.safetensors.index.json"


def fp8_copy(source: Path, folder: Path, shards: int = 1) -> Path:
    """Write an FP8 version of ``source`` into the new ``folder``, in ``shards`` files; return it.

    Projections and experts become e4m3 with a float32 scale for each block of 128 x 128, edge
    blocks smaller; norms, embedding and head stay, the router is widened to float32.
    Its config.json names bfloat16, as those of published ones do.
    """
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != _INDEX:
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    config.update(dtype="bfloat16", quantization_config=QUANTIZATION)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    made: list[dict[str, torch.Tensor]] = []
    for file in sorted(source.glob("*.safetensors")):
        made += [_as_fp8(name, each) for name, each in load_file(file).items()]
    _save(made, folder, shards)
    return folder


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix [row, column] as e4m3, and the float32 scales [block row, block column]."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    most = torch.finfo(torch.float8_e4m3fn).max
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            part = weight[place].float()
            scale = scales[row, column] = part.abs().max().clamp(min=1e-12) / most
            stored[place] = (part / scale).to(torch.float8_e4m3fn)
    return stored, scales


def _as_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.dim() == 2 and _QUANTISED.search(name):
        stored, scales = quantise(tensor)
        return {name: stored, f"{name}_scale_inv": scales}
    return {name: tensor.float() if _FLOAT32.search(name) else tensor}


def _save(made: list[dict[str, torch.Tensor]], folder: Path, shards: int) -> None:
    if shards == 1:
        tensors = {name: each for some in made for name, each in some.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = made[len(made) * number // shards : len(made) * (number + 1) // shards]
        tensors = {key: each for some in part for key, each in some.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
