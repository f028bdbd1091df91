"""Small checkpoints of every architecture that is read from GGUF, wide enough for its types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders

# K-quants come in blocks of 256 numbers.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# What GPT-OSS's file says of its rotation.
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}


def _qwen2(folder: Path) -> Path:
    from transformers import Qwen2Config

    return folders._save(Qwen2Config(**{**folders.SHARED, **WIDE}), folder, 0)


def _gemma3(folder: Path) -> Path:
    from transformers import Gemma3TextConfig

    own = {"sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 6}
    return folders._save(Gemma3TextConfig(**{**folders.SHARED, **WIDE, **own}), folder, 0)


# By transformers' model type. Widths that transformers does not read from a file are its own.
MAKE: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: folders.llama(folder, **WIDE),
    "qwen2": _qwen2,
    "qwen3": lambda folder: folders.qwen3(folder, **{**WIDE, "head_dim": 128}),
    "qwen3_moe": lambda folder: folders.qwen3_moe(
        folder, **WIDE, moe_intermediate_size=768, mlp_only_layers=[]
    ),
    "minimax_m2": lambda folder: folders.minimax_m2(folder, **WIDE),
    "gpt_oss": lambda folder: folders.gpt_oss(folder, **WIDE),
    "gemma3_text": _gemma3,
}
