"""Small checkpoints with real architectures, made on the spot as real Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def minimax_m2(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """MiniMax-M2: partial rotary, sigmoid router with a bias that is not zero."""
    from transformers import MiniMaxM2Config

    config = MiniMaxM2Config(
        **{
            **SHARED,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            **changes,
        }
    )
    return _save(config, folder, seed)


def llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Llama, dense; the head tied to the embedding."""
    from transformers import LlamaConfig

    settings = {**SHARED, "intermediate_size": 96, "tie_word_embeddings": True, **changes}
    return _save(LlamaConfig(**settings), folder, seed)


def gpt_oss(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """GPT-OSS: experts with biases, sinks, and a window in every second block."""
    from transformers import GptOssConfig

    settings = {
        **SHARED,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        **changes,
    }
    return _save(GptOssConfig(**settings), folder, seed)


def cohere(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Cohere: attention and MLP side by side; the model scales its logits."""
    from transformers import CohereConfig

    settings = {**SHARED, "intermediate_size": 96, "logit_scale": 0.5, **changes}
    return _save(CohereConfig(**settings), folder, seed)


def qwen3(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Qwen3, dense: queries and keys are normed by head; the head has weights of its own."""
    from transformers import Qwen3Config

    return _save(Qwen3Config(**{**SHARED, "intermediate_size": 96, **changes}), folder, seed)


def qwen3_moe(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Qwen3-MoE with a dense block (1) between sparse ones: two layer classes."""
    from transformers import Qwen3MoeConfig

    settings = {
        **SHARED,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        **changes,
    }
    return _save(Qwen3MoeConfig(**settings), folder, seed)


def deepseek_v32(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """DeepSeek-V3.2: attention looks at the few tokens that an indexer scores best; one block."""
    from transformers import AutoConfig

    settings = {
        **SHARED,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        **changes,
    }
    return _save(AutoConfig.for_model("deepseek_v32", **settings), folder, seed)


FAMILIES = {"minimax_m2": minimax_m2, "llama": llama, "qwen3_moe": qwen3_moe}


def _save(config: Any, folder: Path, seed: int) -> Path:
    """Save a randomly initialised model whose norms and biases are not their defaults."""
    import torch
    from transformers import AutoModelForCausalLM

    from layerparity.selftest.models import save_narrow

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                value.mul_(torch.empty_like(value).log_normal_(0.0, 0.5))
            elif "e_score_correction_bias" in name:
                value.copy_(8.5 + 0.0625 * torch.randint(-4, 5, value.shape))
            elif value.dim() > 1 and value.is_floating_point():
                value.mul_(4.0)
    save_narrow(model, folder)
    return folder
