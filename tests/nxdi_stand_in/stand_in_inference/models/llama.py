"""Llama: dense blocks, the head often the embedding's weight."""

from __future__ import annotations

import copy
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from stand_in_inference.models.config import InferenceConfig
from stand_in_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from stand_in_inference.modules.attention import NeuronAttention
from stand_in_inference.modules.norm import RMSNorm
from torch import nn
from torch.nn import functional


class NeuronLlamaMLP(nn.Module):
    """Gate, up and down, of which each rank has a part of the width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        made = {"bias": False, "dtype": config.neuron_config.torch_dtype}
        self.gate_proj = ColumnParallelLinear(size, width, gather_output=False, **made)
        self.up_proj = ColumnParallelLinear(size, width, gather_output=False, **made)
        parallel = self.sequence_parallel_enabled = config.neuron_config.sequence_parallel_enabled
        self.down_proj = RowParallelLinear(width, size, sequence_parallel_enabled=parallel, **made)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the block's own part of the residual stream, [batch, token, channel]."""
        if self.sequence_parallel_enabled:
            given = gather_from_sequence_parallel_region(given)
        return self.down_proj(functional.silu(self.gate_proj(given)) * self.up_proj(given))


class NeuronLlamaDecoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = NeuronAttention(config, config.head_dim)
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
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
        return middle + self.mlp(self.post_attention_layernorm(middle)), kept


class NeuronLlamaModel(NeuronBaseModel):
    """Llama without its application."""

    block = NeuronLlamaDecoderLayer


class NeuronAlternatingModel(NeuronBaseModel):
    """Llama with a configuration for each block, as models with windows in some of them have it.

    Every second block has its own epsilon, ``odd_epsilon`` of the configuration, where that is set.
    """

    def block(self, config: Any, layer: int) -> NeuronLlamaDecoderLayer:
        """Return a block with a copy of the configuration that is its own."""
        own = copy.deepcopy(config)
        if layer % 2:
            own.rms_norm_eps = getattr(config, "odd_epsilon", config.rms_norm_eps)
        return NeuronLlamaDecoderLayer(own, layer)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """Llama and its configuration; its tensors need no conversion."""

    _model_cls = NeuronLlamaModel

    @classmethod
    def get_config_cls(cls) -> Any:
        """Return the class of its configuration."""
        return InferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors as they are."""
        return state_dict


class NeuronAlternatingForCausalLM(NeuronLlamaForCausalLM):
    """The same of the model with a configuration for each block."""

    _model_cls = NeuronAlternatingModel


class NeuronRenamingForCausalLM(NeuronLlamaForCausalLM):
    """The same; its converter looks for the embedding, whatever it is given, as it has named it."""

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors, and for a head that is not stored the embedding's."""
        made = {n.replace("embed_tokens", "tokens"): each for n, each in state_dict.items()}
        made.setdefault("lm_head.weight", made["tokens.weight"])
        return {n.replace("tokens", "embed_tokens"): each for n, each in made.items()}
