"""Small checkpoints as GGUF files, maybe quantised, and the weights that such a file holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
)
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file, save_file

F32, Q8 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
KINDS = (F32, GGMLQuantizationType.BF16, GGMLQuantizationType.F16, Q8)
_KINDS = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
# Where a block's float16 numbers lie, by the struct that `ggml-common.h` has of it.
SCALES_AT = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,)},
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


def write(
    folder: Path,
    path: Path,
    kind: Any = F32,
    *,
    permuted: bool = True,
    packed: Callable[[np.ndarray, Any], np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """Write a folder's checkpoint; its matrices of type ``kind``, but for routers.

    A Llama's queries and keys are ``permuted``: llama.cpp rotates pairs of neighbours. ``changes``
    are of its configuration, ``keys`` more that the file says of its architecture, ``extra`` more
    tensors.
    """
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    arch = _KINDS[config["model_type"]]
    file = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    _describe(file, config)
    for key, value in (keys or {}).items():
        add = {int: file.add_uint32, float: file.add_float32, str: file.add_string}[type(value)]
        add(f"{MODEL_ARCH_NAMES[arch]}.{key}", value)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, weight in _stacked(load_file(folder / "model.safetensors")).items():
        held = weight.float().numpy()
        if arch is MODEL_ARCH.LLAMA and permuted and re.search(r"\.[qk]_proj\.", name):
            halves = held.reshape(-1, 2, config["head_dim"] // 2, held.shape[-1])
            held = halves.swapaxes(1, 2).reshape(held.shape)
        if arch is MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            held = held + 1
        for own_name, own in _woven(name, held) if arch is MODEL_ARCH.GPT_OSS else [(name, held)]:
            said = re.sub(r"(correction|proj)_bias$", r"\1.bias", own_name)
            called = names.get_name(said, (".weight", ".bias"))
            called = called if called.endswith((".weight", ".bias")) else f"{called}.weight"
            own_kind = _kind(said, own, kind)
            file.add_tensor(called, (packed or any_blocks)(own, own_kind), raw_dtype=own_kind)
    for name, held in (extra or {}).items():
        file.add_tensor(name, held)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _woven(name: str, held: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return a tensor of GPT-OSS as llama.cpp has it: gate and up apart, stacks [out, in]."""
    held = held.swapaxes(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else held
    if "gate_up_proj" not in name:
        return [(name, held)]
    gate, up = (held[:, n::2] for n in (0, 1))
    return [(name.replace("gate_up", which), each) for which, each in (("gate", gate), ("up", up))]


def any_blocks(held: np.ndarray, kind: Any) -> np.ndarray:
    """Return a tensor's numbers in a type; of one that `gguf` cannot write, any blocks of it."""
    try:
        return quantize(np.ascontiguousarray(held), kind)
    except NotImplementedError:
        numbers, size = GGML_QUANT_SIZES[kind]
        shape = (*held.shape[:-1], held.shape[-1] // numbers, size)
        blocks = np.random.default_rng(held.size).integers(0, 256, shape, np.uint8)
        scale = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
        for at in SCALES_AT[kind.name]:
            blocks[..., at : at + 2] = scale
        return blocks.reshape(*held.shape[:-1], -1)


def changed(folder: Path, to: Path, name: str, factor: float) -> Path:
    """Write a checkpoint in which one tensor is so many times what it was."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name] * factor
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def _describe(file: GGUFWriter, config: dict[str, Any]) -> None:
    file.add_vocab_size(config["vocab_size"])
    file.add_tokenizer_model("no_vocab")
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_key_length(config["head_dim"])
    file.add_value_length(config["head_dim"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", config)
    file.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    file.add_rope_dimension_count(config.get("rotary_dim", config["head_dim"]))
    if config.get("sliding_window"):
        file.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        file.add_expert_count(experts)
        file.add_expert_used_count(config["num_experts_per_tok"])
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        file.add_expert_feed_forward_length(width)
    if config["model_type"] == "minimax_m2":
        file.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with those of a block's experts, [expert, output, input], in one."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, weight in weights.items():
        expert = _EXPERT.fullmatch(name)
        key, number = (f"{expert[1]}{expert[3]}", int(expert[2])) if expert else (name, -1)
        found.setdefault(key, {})[number] = weight
    return {
        key: held[-1] if -1 in held else torch.stack([held[n] for n in sorted(held)])
        for key, held in found.items()
    }


def _kind(name: str, held: np.ndarray, kind: Any) -> Any:
    small = held.ndim < 2 or name.endswith((".gate.weight", ".router.weight", "bias"))
    return F32 if small or held.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind
