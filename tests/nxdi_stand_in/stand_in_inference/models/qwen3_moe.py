"""Qwen3-MoE: a norm of each head's queries and keys, a router by softmax, and no dense block."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_inference.models.config import InferenceConfig, MoENeuronConfig
from stand_in_inference.models.minimax_m2 import stack_experts
from stand_in_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from stand_in_inference.modules.attention import NeuronAttention
from stand_in_inference.modules.moe import MoE
from stand_in_inference.modules.norm import RMSNorm
from torch import nn


class Qwen3MoeInferenceConfig(InferenceConfig):
    """What config.json of a Qwen3-MoE says."""

    required = ("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size")

    @classmethod
    def get_neuron_config_cls(cls) -> type[MoENeuronConfig]:
        """Return the configuration of models with experts."""
        return MoENeuronConfig


class NeuronQwen3MoeDecoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = NeuronAttention(config, config.head_dim, qk_norm="head")
        self.mlp = MoE(config, config.num_experts, config.moe_intermediate_size, by_softmax=True)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm.sliced = config.neuron_config.mistake == "norm_sliced"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the block's output [batch, token, channel], and its tokens' keys and values."""
        normed = self.input_layernorm(hidden_states)
        attended, kept = self.self_attn(normed, attention_mask, position_ids, past_key_value)
        middle = hidden_states + attended
        return middle + self.mlp(self.post_attention_layernorm(middle))[0], kept


class NeuronQwen3MoeModel(NeuronBaseModel):
    """Qwen3-MoE without its application."""

    block = NeuronQwen3MoeDecoderLayer


class NeuronQwen3MoeForCausalLM(NeuronBaseForCausalLM):
    """Qwen3-MoE, its configuration and its converter."""

    _model_cls = NeuronQwen3MoeModel

    @classmethod
    def get_config_cls(cls) -> Any:
        """Return the class of its configuration."""
        return Qwen3MoeInferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Stack experts and rename the router."""
        names = ("gate_proj", "down_proj", "up_proj")
        for layer in range(config.num_hidden_layers):
            moe = f"layers.{layer}.mlp"
            stack_experts(state_dict, f"{moe}.", config.num_experts, names)
            router = state_dict.pop(f"{moe}.gate.weight")
            state_dict[f"{moe}.router.linear_router.weight"] = router
        return state_dict
