"""Small checkpoints that let a fault show: other architectures, and the shipped one in FP8."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHIPPED = "tiny_minimax_m2"
FP8 = "tiny_minimax_m2_fp8"
# Small enough that a small matrix has several FP8 blocks, some of them cut off.
BLOCK = 40
_QUANTISED = re.compile(r"(_proj|\.experts\.\d+\.w[123])\.weight$")
_WEIGHTS = "model.safetensors"
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
# Blocks of other shapes: norms before and after, attention beside MLP, linear attention in turn
# with full, low-rank attention, shared experts.
_OF_OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {"intermediate_size": 192, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "olmo2": {"intermediate_size": 192},
    "cohere": {"intermediate_size": 192},
    "qwen3_next": {
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
    },
    "deepseek_v3": {
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}
# Of every other architecture: the words for one size differ, and what is not known is passed over.
_OF_ANY: dict[str, Any] = {
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
}
# Buffers that checkpoints store though they follow from a formula: other values are no such model.
_COMPUTED = ("_decay", "slope_rate")
SHAPES = tuple(_OF_OTHER_SHAPES)
MADE = (*_OWN, *SHAPES)


def make_model(
    name: str, folder: Path, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Path:
    """Save a model of an architecture under ``folder``, random, in bfloat16; return where.

    Norm weights are log-normal and matrices of a trained model's scale: defaults hide faults.
    ``changes`` are other sizes than the usual ones. Raises UserError where transformers makes no
    small model of that type.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    try:
        config = small_config(name, changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"A small '{name}' cannot be made ({why}): name a model_type of transformers that is "
            "a causal language model."
        ) from error
    with torch.no_grad():
        for path, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point():
                continue
            if "norm" in path and not path.endswith("bias"):
                factor = torch.empty_like(value).log_normal_(0.0, 0.4)
                # Gemma's norms, and a few others', multiply by 1 more than their weights.
                value.copy_(value * factor if bool(value.any()) else factor - 1)
            elif value.dim() > 1 and not path.endswith(_COMPUTED):
                value.normal_(0.0, value.shape[-1] ** -0.5)
            elif path.endswith("sinks"):
                value.normal_()
            elif "bias" in path:
                value.normal_(0.0, 0.1)
    target = folder / name
    save_narrow(model, target)
    return target


def save_narrow(model: PreTrainedModel, folder: Path) -> None:
    """Save transformers' ``model`` in bfloat16 and its config.json with float32.

    That is what runs of it compute in where no type is asked for: small bugs show in it.
    """
    import torch

    from layerparity.model.conversion import no_bars

    with no_bars():
        model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "dtype": "float32"}, indent=2), encoding="utf-8")


def small_config(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' configuration of a small model of an architecture."""
    from transformers import AutoConfig

    own = (_OWN | _OF_OTHER_SHAPES).get(name)
    sizes = {**_SHARED, **own} if own else {**_SHARED, **_OF_ANY}
    if own is None:
        # What follows from the other sizes cannot be set everywhere.
        del sizes["head_dim"]
    return AutoConfig.for_model(name, **{**sizes, **(changes or {})})


def make_tokens(path: Path, rows: tuple[int, ...], seed: int = 0) -> Path:
    """Write random token ids, one row for each length, to a JSON file."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, _SHARED["vocab_size"], (n,), generator=generator) for n in rows]
    path.write_text(json.dumps([row.tolist() for row in drawn]), encoding="utf-8")
    return path


def make_fp8(source: Path, folder: Path) -> Path:
    """Write the checkpoint ``source``, of one file, to a new folder with its projections in FP8."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != _WEIGHTS:
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layout = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    config["quantization_config"] = layout
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / _WEIGHTS).items():
        tensors[name] = value
        if _QUANTISED.search(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(value)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
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
