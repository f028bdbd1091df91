"""Models: small checkpoints of other architectures, made on the spot, that let a fault show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHIPPED = "tiny_minimax_m2"
_SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 2],
    },
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
}
MADE = tuple(_OWN)


def make_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a model of a known architecture under ``folder``, random, in bfloat16; return where.

    Norm weights are log-normal and matrices of a trained model's scale: defaults hide faults.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from layerparity.model.conversion import no_bars

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **_SHARED, **_OWN[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in path:
                value.mul_(torch.empty_like(value).log_normal_(0.0, 0.4))
            elif value.dim() > 1:
                value.normal_(0.0, value.shape[-1] ** -0.5)
            elif path.endswith("sinks"):
                value.normal_()
            elif "bias" in path:
                value.normal_(0.0, 0.1)
    target = folder / name
    with no_bars():
        model.to(torch.bfloat16).save_pretrained(target)
    return target


def make_tokens(path: Path, rows: tuple[int, ...], seed: int = 0) -> Path:
    """Write random token ids, one row for each length, to a JSON file."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, _SHARED["vocab_size"], (n,), generator=generator) for n in rows]
    path.write_text(json.dumps([row.tolist() for row in drawn]), encoding="utf-8")
    return path
