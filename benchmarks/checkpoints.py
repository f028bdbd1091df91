"""Checkpoints with real architectures and shapes, made on the spot, as large as a disk allows.

The weights are noise of a trained model's scale, cut from one table: no two tensors are equal, and
a checkpoint is written as fast as the disk takes it, a tensor in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
SHARD = 2 * 10**9
_TABLE = 1 << 24
# Of a model that runs in a moment: that a benchmark works is seen, and nothing of how fast.
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def minimax_m2(**changes: Any) -> dict[str, Any]:
    """Return config.json's values of the real MiniMax-M2, with some of them changed."""
    text = (ROOT / "conf/model/minimax_m2.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)["architecture"]
    return {**values, "architectures": ["MiniMaxM2ForCausalLM"], "dtype": "bfloat16", **changes}


def llama(**changes: Any) -> dict[str, Any]:
    """Return config.json's values of a dense model of about 1.5 billion parameters."""
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return {**values, **changes}


def write(
    folder: Path, config: Mapping[str, Any], *, outside: bool = True, table: int = _TABLE
) -> Path:
    """Write a checkpoint in bfloat16 under its published names, unless it is there already.

    Without ``outside`` the embedding and the head are left out: for blocks alone. ``table`` is how
    many numbers the weights are cut from: few are enough for small tensors.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.randn(table, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    where: dict[str, str] = {}
    shards = list(_shards(_tensors(config, outside)))
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, noise)
        where |= dict.fromkeys(shard, name)
    # AirLLM does not begin without a tokenizer; nobody here uses it.
    for file in (ROOT / "checkpoints/tiny_minimax_m2").glob("tokenizer*.json"):
        shutil.copy(file, folder)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _tensors(config: Mapping[str, Any], outside: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    if outside:
        yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _block(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if outside:
        yield "lm_head.weight", (vocabulary, hidden)


def _block(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "post_attention_layernorm.weight", (hidden,)
    if config["model_type"] == "llama":
        yield "mlp.gate_proj.weight", (inner, hidden)
        yield "mlp.up_proj.weight", (inner, hidden)
        yield "mlp.down_proj.weight", (hidden, inner)
        return
    yield "self_attn.q_norm.weight", (queries,)
    yield "self_attn.k_norm.weight", (keys,)
    moe, experts = "block_sparse_moe", config["num_local_experts"]
    yield f"{moe}.gate.weight", (experts, hidden)
    yield f"{moe}.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield f"{moe}.experts.{expert}.w1.weight", (inner, hidden)
        yield f"{moe}.experts.{expert}.w2.weight", (hidden, inner)
        yield f"{moe}.experts.{expert}.w3.weight", (inner, hidden)


def _shards(
    tensors: Iterator[tuple[str, tuple[int, ...]]],
) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in tensors:
        if size > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += 2 * torch.Size(shape).numel()
    yield shard


def _write_shard(path: Path, shard: Mapping[str, tuple[int, ...]], noise: torch.Tensor) -> None:
    header, position = {}, 0
    for name, shape in shard.items():
        end = position + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shard.items()):
            file.write(_values(name, shape, noise, number).view(torch.uint8).numpy().data)


def _values(name: str, shape: tuple[int, ...], noise: torch.Tensor, number: int) -> torch.Tensor:
    """Return a tensor's values, flat: norms near one, a router's bias near 8.5, else noise."""
    count = torch.Size(shape).numel()
    start = (number * 7919) % noise.numel()
    flat = noise.roll(-start).repeat(-(-count // noise.numel()))[:count]
    if "norm" in name:
        return (flat * 0.3).exp()
    if name.endswith("bias"):
        return 8.5 + (flat * 4).round().clamp(-4, 4) * 0.0625
    return flat * shape[-1] ** -0.5
