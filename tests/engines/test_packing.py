"""Packed weights as their formats' own libraries read them: the same values, to the bit.

compressed-tensors reads its own formats; vLLM's packers of AWQ and GPTQ, and its reader of NVFP4,
are held against ours. transformers' reader of MXFP4 is in tests/test_packing.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import packed_small
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from packed_small import FORMATS, awq, gptq
from safetensors.torch import save_file
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

from layerparity.model.checkpoint import Checkpoint
from layerparity.numbers.activations import Activations

NAME = "model.layers.0.self_attn.q_proj.weight"
WEIGHT = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.05
CONFIG = '{"model_type": "llama", "num_hidden_layers": 1, "dtype": "bfloat16"'


def unpacked(folder: Path, tensors: dict[str, torch.Tensor], said: object) -> torch.Tensor:
    """Return the values of the one weight of a folder, bfloat16 [out, in]."""
    import json

    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{CONFIG}, "quantization_config": {json.dumps(said)}}}')
    checkpoint = Checkpoint(folder)
    assert not checkpoint.unpacked.faults
    return checkpoint.value(NAME)


@pytest.mark.parametrize(
    ("form", "kind", "args"),
    [
        ("int4", "pack-quantized", {"strategy": "group", "group_size": 32}),
        (
            "int4_zeros",
            "pack-quantized",
            {"strategy": "group", "group_size": 32, "symmetric": False},
        ),
        ("int8", "int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("fp8_by_row", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        (
            "nvfp4_divided",
            "nvfp4-pack-quantized",
            {"type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ],
)
def test_compressed_tensors_reads_the_same(
    tmp_path: Path, form: str, kind: str, args: dict[str, Any]
) -> None:
    pack, said = FORMATS[form]
    tensors = pack(NAME, WEIGHT)
    weights = QuantizationArgs(**{"num_bits": 4, **args})
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
    short = {name.removeprefix(NAME.removesuffix("weight")): each for name, each in tensors.items()}
    theirs = BaseCompressor.get_value_from_registry(kind).decompress(short, scheme)["weight"]
    assert torch.equal(unpacked(tmp_path, tensors, said), theirs.bfloat16())


def test_vllm_reads_nvfp4_alike(tmp_path: Path) -> None:
    pack, said = FORMATS["nvfp4"]
    tensors = pack(NAME, WEIGHT)
    numbers, scales, overall = (tensors[NAME + end] for end in ("", "_scale", "_scale_2"))
    theirs = dequantize_to_dtype(numbers, scales, overall, torch.bfloat16, swizzle=False)
    assert torch.equal(unpacked(tmp_path, tensors, said), theirs)


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_vllm_packs_as_is_read(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = NAME.removesuffix("weight")
    pack = {"awq": awq, "gptq": gptq}[form]
    ours = pack(NAME, WEIGHT)
    # The numbers themselves, by what was written of them.
    plain: list[torch.Tensor] = []
    made = packed_small._asymmetric

    def seen(weight: torch.Tensor, group: int = packed_small.GROUP) -> tuple[torch.Tensor, ...]:
        plain[:] = made(weight, group)
        return tuple(plain)

    monkeypatch.setattr(packed_small, "_asymmetric", seen)
    pack(NAME, WEIGHT)
    numbers, scales, zeros = plain
    order = ours.get(f"{base}g_idx")
    if order is not None:
        # As the columns lie in the file.
        columns = torch.randperm(96, generator=torch.Generator().manual_seed(96))
        numbers = numbers[:, columns.argsort()]
    packer = quant_utils.awq_pack if form == "awq" else quant_utils.gptq_pack
    theirs = packer(numbers.T.contiguous().int(), 4, 96, 48)
    assert torch.equal(ours[f"{base}qweight"], theirs)
    groups = torch.arange(96) // 32 if order is None else order.long()
    right = (numbers - zeros[:, groups]) * scales.float()[:, groups]
    assert torch.equal(unpacked(tmp_path, ours, FORMATS[form][1]), right.bfloat16())


GROUPS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


@pytest.mark.parametrize(
    ("ours", "args"),
    [
        (Activations("FP8"), {"strategy": "token", "dynamic": True}),
        (Activations("FP8", 16), {"strategy": "group", "group_size": 16, "dynamic": True}),
        (Activations("FP8", whole=True), {"strategy": "tensor", "dynamic": True}),
        (Activations("FP8", fixed=0.02), {"strategy": "tensor"}),
        (Activations("FP4", 16, fixed=1 / 512), {**GROUPS, "scale_dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_compressed_tensors_rounds_activations_the_same(
    ours: Activations, args: dict[str, Any]
) -> None:
    given = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    asked = QuantizationArgs(**{"num_bits": 8, "type": "float", **args})
    overall = torch.tensor([512.0]) if "scale_dtype" in args else None
    scale, zero = torch.tensor([0.02]), None
    if asked.dynamic:
        module = torch.nn.Module()
        scale, zero = compute_dynamic_scales_and_zp(given, asked, module, global_scale=overall)
    right = fake_quantize(given, scale, zero, asked, global_scale=overall)
    assert torch.equal(ours.rounded(given), right)
