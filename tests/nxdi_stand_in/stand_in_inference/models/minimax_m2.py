"""MiniMax-M2: norms of queries and keys over all heads, partial rotary, a router with a bias."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_inference.models.config import InferenceConfig, MoENeuronConfig
from stand_in_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from stand_in_inference.modules.attention import NeuronAttention
from stand_in_inference.modules.heads import sharded_heads
from stand_in_inference.modules.moe import MoE
from stand_in_inference.modules.norm import RMSNorm
from torch import nn


class MiniMaxM2InferenceConfig(InferenceConfig):
    """What config.json of a MiniMax-M2 says."""

    required = ("head_dim", "num_local_experts", "num_experts_per_tok", "rotary_dim")

    @classmethod
    def get_neuron_config_cls(cls) -> type[MoENeuronConfig]:
        """Return the configuration of models with experts."""
        return MoENeuronConfig


class NeuronMiniMaxM2DecoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        unturned = config.neuron_config.mistake == "odd_layers_unrotated" and layer_idx % 2
        rotary = 0 if unturned else config.rotary_dim
        self.self_attn = NeuronAttention(config, rotary, qk_norm="all heads")
        self.block_sparse_moe = MoE(config, config.num_local_experts, config.intermediate_size)
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
        experts = self.block_sparse_moe(self.post_attention_layernorm(middle))[0]
        return middle + experts, kept


class NeuronMiniMaxM2Model(NeuronBaseModel):
    """MiniMax-M2 without its application."""

    block = NeuronMiniMaxM2DecoderLayer


class NeuronMiniMaxM2ForCausalLM(NeuronBaseForCausalLM):
    """MiniMax-M2, its configuration and its converter."""

    _model_cls = NeuronMiniMaxM2Model

    @classmethod
    def get_config_cls(cls) -> Any:
        """Return the class of its configuration."""
        return MiniMaxM2InferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Stack experts, rename the router, pad and repeat the norms of queries and keys."""
        mistake, heads = config.neuron_config.mistake, sharded_heads(config)
        _dequantise(state_dict, config)
        for layer in range(config.num_hidden_layers):
            attention, moe = f"layers.{layer}.self_attn", f"layers.{layer}.block_sparse_moe"
            if mistake == "converter_raises":
                raise ValueError(f"layer {layer} is not what was expected")
            if mistake == "converter_loses_a_tensor":
                del state_dict[f"{attention}.k_proj.weight"]
            q_norm, k_norm = f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"
            state_dict[q_norm] = heads.pad_queries(state_dict[q_norm], 0)
            state_dict[k_norm] = heads.repeat_keys(state_dict[k_norm], mistake == "kv_tiled")
            names = ("w1", "w2", "w3")
            stack_experts(state_dict, f"{moe}.", config.num_local_experts, names)
            router = f"{moe}.router"
            state_dict[f"{router}.linear_router.weight"] = state_dict.pop(f"{moe}.gate.weight")
            bias = state_dict.pop(f"{moe}.e_score_correction_bias")
            if mistake != "bias_deleted":
                state_dict[f"{router}.e_score_correction_bias"] = bias
        return state_dict


def _dequantise(state: dict[str, torch.Tensor], config: Any) -> None:
    """Multiply FP8 weights by the scales of their blocks, and drop the scales."""
    for name in [name for name in state if name.endswith("_scale_inv")]:
        scales = state.pop(name)
        weight = state[name.removesuffix("_scale_inv")]
        rows, columns = config.quantization_config["weight_block_size"]
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]].float()
        if config.neuron_config.mistake == "fp8_scale_inverted":
            wide = 1 / wide
        value = weight.float() * wide
        state[name.removesuffix("_scale_inv")] = value.to(config.neuron_config.torch_dtype)


def stack_experts(
    state: dict[str, torch.Tensor], prefix: str, count: int, names: tuple[str, str, str]
) -> None:
    """Replace the experts' matrices by one of gate and up, and one of down, both transposed.

    ``names`` are those of gate, down and up.
    """
    gate, down, up = (
        torch.stack([state.pop(f"{prefix}experts.{each}.{name}.weight").T for each in range(count)])
        for name in names
    )
    to = f"{prefix}expert_mlps.mlp_op"
    state[f"{to}.gate_up_proj.weight"] = torch.cat([gate, up], -1)
    state[f"{to}.down_proj.weight"] = down
