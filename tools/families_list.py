"""The families of the table in docs/reference/families.md, and the sizes of their small models.

The choice: the text models of transformers that people port and serve today, one `model_type` for
each way that a block is built. Fine-tunes, renamed copies of another family's blocks, encoders and
models of images or sound are left out.
"""

from __future__ import annotations

from typing import Any

DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "phi",
    "phi3",
    "olmo2",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "stablelm",
    "smollm3",
    "glm4",
    "exaone4",
    "nemotron",
    "gpt2",
    "gpt_neox",
    "gptj",
    "bloom",
    "falcon",
    "opt",
    "mpt",
    "nanochat",
)
EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "gpt_oss",
    "granitemoe",
    "phimoe",
    "llama4_text",
    "olmoe",
    "glm4_moe",
    "glm_moe_dsa",
    "mimo_v2_flash",
    "dbrx",
)
STATES = (
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_text",
    "minimax",
    "lfm2",
    "kimi_linear",
)
FAMILIES = (*DENSE, *EXPERTS, *STATES)

_MIXER = {
    "mamba_n_heads": 8,
    "mamba_d_head": 24,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_ALTERNATING = ["linear_attention", "full_attention"] * 2
_LOW_RANK: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
# What a small model of these is not, or is too large, with the sizes that all have.
SIZES: dict[str, dict[str, Any]] = {
    # As E2B and E4B: an embedding for each block, and the last ones take others' keys and values.
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "head_dim": 24,
        "global_head_dim": 24,
        "sliding_window": 16,
    },
    "gptj": {"rotary_dim": 8},
    # The width of its experts follows from d_model alone, and only in ffn_config are they counted.
    "dbrx": {
        "d_model": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok")),
    },
    # Of eight, the prompt's tokens leave one out.
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v2": {
        **_LOW_RANK,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    # As GLM-5.2: every other block looks at the tokens that the one before chose.
    "glm_moe_dsa": {
        **_LOW_RANK,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 12,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "indexer_types": ["full", "shared"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "llama4_text": {"intermediate_size_mlp": 192, "head_dim": 24, "interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8, "head_dim": 24, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "bamba": {**_MIXER, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MIXER, "mamba_d_ssm": 192, "head_dim": 24},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "head_dim": 24,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 48,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 24,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "granitemoehybrid": {**_MIXER, "layer_types": _ALTERNATING},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "qwen3_5_text": {
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": _ALTERNATING,
    },
    "minimax": {"layer_types": _ALTERNATING},
    "lfm2": {"block_ff_dim": 192, "layer_types": ["conv", "full_attention"] * 2},
    "kimi_linear": {
        **_LOW_RANK,
        "q_lora_rank": None,
        "head_dim": 16,
        "num_experts_per_token": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}
