"""Makers of FP8 checkpoints for tests: the real MiniMax-M2 by name, shape and count, in no space.

The files are sparse: true headers, and holes where the numbers would be.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from conftest import ROOT

from layerparity.model.header import BITS

SHARDS = 130
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
BLOCK = 128
Entry = tuple[str, str, tuple[int, ...]]


def real_config(**changes: Any) -> dict[str, Any]:
    """Return config.json's values of MiniMax-M2, as an FP8 checkpoint has them."""
    values = yaml.safe_load((ROOT / "conf/model/minimax_m2.yaml").read_text())["architecture"]
    return {**values, "dtype": "bfloat16", "quantization_config": QUANTIZATION, **changes}


def big_fp8_folder(folder: Path, shards: int = SHARDS, **changes: Any) -> Path:
    """Make a folder of sparse shards, with index and config.json; ``changes`` are config keys.

    Without changes: 62 layers of 256 experts, 229 GB in 130 files, a few megabytes on disk.
    """
    config = real_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    entries = list(minimax_entries(config))
    total = sum(size_of(entry) for entry in entries)
    held: list[list[Entry]] = [[] for _ in range(shards)]
    before = 0
    for entry in entries:
        held[before * shards // total].append(entry)
        before += size_of(entry)
    weight_map = {}
    for number, part in enumerate(held, start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_sparse(folder / name, part)
        weight_map.update({entry[0]: name for entry in part})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def size_of(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    return BITS[entry[1]] * math.prod(entry[2]) // 8


def write_sparse(file: Path, entries: list[Entry]) -> None:
    """Write a safetensors file whose numbers are a hole."""
    header, end = {}, 0
    for entry in entries:
        begin, end = end, end + size_of(entry)
        header[entry[0]] = {"dtype": entry[1], "shape": entry[2], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)


def minimax_entries(config: dict[str, Any]) -> Iterator[Entry]:
    """Yield name, dtype and shape of every tensor of an FP8 MiniMax-M2, in the model's order."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", "BF16", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(f"model.layers.{layer}", config)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocabulary, hidden)


def _layer(path: str, config: dict[str, Any]) -> Iterator[Entry]:
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    experts = config["num_local_experts"]
    yield f"{path}.input_layernorm.weight", "BF16", (hidden,)
    yield from _scaled(f"{path}.self_attn.q_proj", (queries, hidden))
    yield from _scaled(f"{path}.self_attn.k_proj", (keys, hidden))
    yield from _scaled(f"{path}.self_attn.v_proj", (keys, hidden))
    yield from _scaled(f"{path}.self_attn.o_proj", (hidden, queries))
    yield f"{path}.self_attn.q_norm.weight", "BF16", (queries,)
    yield f"{path}.self_attn.k_norm.weight", "BF16", (keys,)
    yield f"{path}.post_attention_layernorm.weight", "BF16", (hidden,)
    yield f"{path}.block_sparse_moe.gate.weight", "F32", (experts, hidden)
    yield f"{path}.block_sparse_moe.e_score_correction_bias", "F32", (experts,)
    for expert in range(experts):
        inside = f"{path}.block_sparse_moe.experts.{expert}"
        yield from _scaled(f"{inside}.w1", (middle, hidden))
        yield from _scaled(f"{inside}.w2", (hidden, middle))
        yield from _scaled(f"{inside}.w3", (middle, hidden))


def _scaled(path: str, shape: tuple[int, int]) -> Iterator[Entry]:
    yield f"{path}.weight", "F8_E4M3", shape
    scales = tuple(-(-size // BLOCK) for size in shape)
    yield f"{path}.weight_scale_inv", "F32", scales
