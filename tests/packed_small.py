"""Small checkpoints in the formats that vendors pack weights in, made of a plain folder.

Packing is written after the formats' descriptions, and apart from how layerparity unpacks; the
formats' own libraries read what is written here in tests/engines/test_packing.py.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
GROUP = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Return whole numbers [row, column] in int32 words [row, word], the first in the low bits."""
    pack = 32 // bits
    rows, columns = numbers.shape
    padded = torch.nn.functional.pad(numbers.long(), (0, -columns % pack)).view(rows, -1, pack)
    words = (padded << (bits * torch.arange(pack))).sum(-1)
    return (words - (words >= 2**31) * 2**32).to(torch.int32)


def _grouped(weight: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    return weight.float().view(weight.shape[0], -1, group)


def _asymmetric(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, ...]:
    """Return four-bit numbers [out, in], float16 scales and zero points [out, group]."""
    parts = _grouped(weight, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    numbers = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.view(weight.shape), scales, zeros


def awq(name: str, weight: torch.Tensor) -> Tensors:
    """Return a weight [out, in] as AutoAWQ's gemm version stores it."""
    numbers, scales, zeros = _asymmetric(weight)

    def packed(along: torch.Tensor) -> torch.Tensor:
        eights = along.view(len(along), -1, 8)[..., list(AWQ_PLACES)]
        return _words(eights.reshape(along.shape))

    base = name.removesuffix("weight")
    return {
        f"{base}qweight": packed(numbers.T.contiguous()),
        f"{base}qzeros": packed(zeros.T.contiguous()),
        f"{base}scales": scales.T.contiguous(),
    }


def gptq(name: str, weight: torch.Tensor, act_order: bool = True) -> Tensors:
    """Return a weight [out, in] as AutoGPTQ stores it, with columns in an order of their own."""
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    order = order if act_order else torch.arange(columns)
    numbers, scales, zeros = _asymmetric(weight[:, order])
    group_of, back = torch.arange(columns) // GROUP, order.argsort()
    base = name.removesuffix("weight")
    return {
        f"{base}qweight": _words(numbers[:, back]).T.contiguous(),
        f"{base}qzeros": _words((zeros - 1).T.contiguous()),
        f"{base}scales": scales.T.contiguous(),
        f"{base}g_idx": group_of[back].to(torch.int32),
    }


def int4(name: str, weight: torch.Tensor, zero_points: bool = False) -> Tensors:
    """Return a weight [out, in] as compressed-tensors packs four bits by groups."""
    shape = {f"{name}_shape": torch.tensor(weight.shape)}
    if zero_points:
        numbers, scales, zeros = _asymmetric(weight)
        more = {f"{name}_zero_point": _words(zeros.T.contiguous()).T.contiguous()}
        return {
            f"{name}_packed": _words(numbers),
            f"{name}_scale": scales.bfloat16(),
            **more,
            **shape,
        }
    parts = _grouped(weight)
    scales = (parts.abs().amax(-1) / 7.5).clamp(min=1e-6).bfloat16()
    numbers = (parts / scales.float()[..., None]).round().clamp(-8, 7).view(weight.shape) + 8
    return {f"{name}_packed": _words(numbers), f"{name}_scale": scales, **shape}


def int8(name: str, weight: torch.Tensor) -> Tensors:
    """Return a weight [out, in] in eight bits with a scale by row, as W8A8 checkpoints have it."""
    scales = (weight.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6).bfloat16()
    return {
        name: (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8),
        f"{name}_scale": scales,
    }


def fp8_by_row(name: str, weight: torch.Tensor) -> Tensors:
    """Return a weight [out, in] in e4m3 with a scale by row, as compressed-tensors stores it."""
    scales = (weight.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6).bfloat16()
    return {
        name: (weight.float() / scales.float()).to(torch.float8_e4m3fn),
        f"{name}_scale": scales,
    }


def fp8_by_weight(name: str, weight: torch.Tensor) -> Tensors:
    """Return a weight in e4m3 with one scale and one of its inputs, as ModelOpt stores it."""
    scale = (weight.float().abs().max() / 448).clamp(min=1e-6)
    base = name.removesuffix("weight")
    return {
        name: (weight.float() / scale).to(torch.float8_e4m3fn),
        f"{name}_scale": scale,
        f"{base}input_scale": torch.tensor(0.02),
    }


def _fp4(scaled: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 numbers of [row, column] as bytes [row, column / 2]."""
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (nearest[:, ::2] | nearest[:, 1::2] << 4).to(torch.uint8)


def nvfp4(name: str, weight: torch.Tensor, divides: bool = False) -> Tensors:
    """Return a weight [out, in] in NVFP4 as ModelOpt stores it, or compressed-tensors."""
    parts = _grouped(weight, 16)
    overall = (weight.float().abs().max() / (6 * 448)).clamp(min=1e-9)
    scales = (parts.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
    wide = (scales.float() * overall).clamp(min=1e-12)[..., None]
    packed = _fp4((parts / wide).view(weight.shape))
    base = name.removesuffix("weight")
    if divides:
        return {
            f"{name}_packed": packed,
            f"{name}_scale": scales,
            f"{name}_global_scale": (1 / overall)[None],
        }
    return {
        name: packed,
        f"{name}_scale": scales,
        f"{name}_scale_2": overall,
        f"{base}input_scale": torch.tensor(0.02),
    }


def _mx(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [row, column] in MXFP4: bytes [row, group, 16], scales uint8 [row, group]."""
    parts = _grouped(rows)
    exponents = (parts.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    packed = _fp4((parts / torch.exp2(exponents)[..., None]).view(rows.shape))
    return packed.view(rows.shape[0], -1, 16), (exponents + 127).to(torch.uint8)


def mxfp4_experts(name: str, weight: torch.Tensor) -> Tensors:
    """Return experts' weights [expert, in, out] as gpt-oss publishes them."""
    made = [_mx(each.T.contiguous()) for each in weight]
    blocks, scales = (torch.stack(list(each)) for each in zip(*made, strict=True))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _groups(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
# By name: what packs a weight, and what config.json says of it.
FORMATS: Mapping[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "int4": (int4, _groups(**_INT4, symmetric=True)),
    "int4_zeros": (lambda n, w: int4(n, w, zero_points=True), _groups(**_INT4, symmetric=False)),
    "int8": (
        int8,
        {**_groups(num_bits=8, type="int", strategy="channel"), "format": "int-quantized"},
    ),
    "fp8_by_row": (fp8_by_row, _groups(num_bits=8, type="float", strategy="channel")),
    "fp8_by_weight": (fp8_by_weight, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4_divided": (lambda n, w: nvfp4(n, w, divides=True), _groups(num_bits=4, type="float")),
    "mxfp4": (mxfp4_experts, {"quant_method": "mxfp4"}),
}
_LINEAR = re.compile(r"(_proj|\.experts\.\d+\.w[123])\.weight$")
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")


def packed_copy(source: Path, folder: Path, form: str) -> Path:
    """Write a folder of plain weights into the new ``folder`` with its projections packed."""
    pack, said = FORMATS[form]
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    config.update(dtype="bfloat16", quantization_config=said)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    wanted = _EXPERTS if form == "mxfp4" else _LINEAR
    made: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, each in load_file(file).items():
            made |= pack(name, each) if wanted.search(name) else {name: each.bfloat16()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rounding_inputs(folder: Path, **said: Any) -> Path:
    """Have a folder of compressed-tensors say how inputs are rounded; a fixed scale is 0.05."""
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "dynamic": True, "symmetric": True, **said}
    (folder / "config.json").write_text(json.dumps(config))
    if said.get("dynamic") is False:
        tensors = load_file(folder / "model.safetensors")
        scales = {n.replace("weight_scale", "input_scale") for n in tensors if "_scale" in n}
        tensors |= {name: torch.tensor([0.05]) for name in scales}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give transformers' model weights by their stored names; experts it holds in one stack."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        if ".experts." not in path:
            held = getattr(model.get_submodule(path), last).data
        else:
            experts, number, kind = path.rsplit(".", 2)
            owner, half = model.get_submodule(experts), (kind == "up_proj") * len(value)
            stack = owner.down_proj if kind == "down_proj" else owner.gate_up_proj
            held = stack.data[int(number), half : half + len(value)]
        held.copy_(value)
