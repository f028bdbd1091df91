"""Small checkpoints as GGUF files, maybe quantised, and the weights that such a file holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
)
from gguf.quants import dequantize, quantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file, save_file

F32, Q8 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
KINDS = (F32, GGMLQuantizationType.BF16, GGMLQuantizationType.F16, Q8)
_KINDS = {"llama": MODEL_ARCH.LLAMA, "minimax_m2": MODEL_ARCH.MINIMAXM2}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


def write(
    folder: Path, path: Path, kind: Any = F32, *, permuted: bool = True, **changes: Any
) -> Path:
    """Write a folder's checkpoint; its matrices of type ``kind``, but for routers.

    A Llama's queries and keys are ``permuted``: llama.cpp rotates pairs of neighbours. ``changes``
    are of its configuration.
    """
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    arch = _KINDS[config["model_type"]]
    file = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    _describe(file, config)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, weight in _stacked(load_file(folder / "model.safetensors")).items():
        held = weight.float().numpy()
        if arch is MODEL_ARCH.LLAMA and permuted and re.search(r"\.[qk]_proj\.", name):
            halves = held.reshape(-1, 2, config["head_dim"] // 2, held.shape[-1])
            held = halves.swapaxes(1, 2).reshape(held.shape)
        said = name.replace("e_score_correction_bias", "e_score_correction.bias")
        own = _kind(name, held, kind)
        file.add_tensor(
            names.get_name(said, (".weight", ".bias")),
            quantize(np.ascontiguousarray(held), own),
            raw_dtype=own,
        )
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def rounded(folder: Path, to: Path, kind: Any) -> Path:
    """Write a checkpoint of the weights that a GGUF of this kind holds."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        held = weight.float().numpy()
        own = _kind(name, held, kind)
        weights[name] = torch.from_numpy(dequantize(quantize(held, own), own))
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


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
    file.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    file.add_rope_dimension_count(config.get("rotary_dim", config["head_dim"]))
    if "num_local_experts" in config:
        file.add_expert_count(config["num_local_experts"])
        file.add_expert_used_count(config["num_experts_per_tok"])
        file.add_expert_feed_forward_length(config["intermediate_size"])
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
    return F32 if held.ndim < 2 or ".gate.weight" in name else kind
