"""Apertus: an activation with learned numbers, and with two that are stored and stand in code."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from stand_in_inference.models.llama import NeuronLlamaDecoderLayer, NeuronLlamaForCausalLM
from stand_in_inference.models.model_base import NeuronBaseModel
from stand_in_inference.modules.attention import NeuronAttention
from torch import nn
from torch.nn import functional


class XIELU(nn.Module):
    """A parabola above zero, an exponential below, and a line through both."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.ones(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.ones(1), requires_grad=False)
        self.beta = 0.51 if config.neuron_config.mistake == "other_number" else 0.5
        self.eps = -1e-6

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the activation of each number."""
        above = functional.softplus(self.alpha_p) * given.square()
        curve = torch.expm1(given.clamp(max=self.eps)) - given
        below = (self.beta + functional.softplus(self.alpha_n)) * curve
        return above.where(given > 0, below) + self.beta * given


class ApertusMLP(nn.Module):
    """Up and down, of which each rank has a part of the width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        made = {"bias": False, "dtype": config.neuron_config.torch_dtype}
        self.up_proj = ColumnParallelLinear(size, width, gather_output=False, **made)
        self.act_fn = XIELU(config)
        self.down_proj = RowParallelLinear(width, size, **made)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the block's own part of the residual stream, [batch, token, channel]."""
        return self.down_proj(self.act_fn(self.up_proj(given)))


class ApertusDecoderLayer(NeuronLlamaDecoderLayer):
    """One block."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = NeuronAttention(config, config.head_dim, qk_norm="head")
        self.mlp = ApertusMLP(config)


class NeuronApertusModel(NeuronBaseModel):
    """Apertus without its application."""

    block = ApertusDecoderLayer


class NeuronApertusForCausalLM(NeuronLlamaForCausalLM):
    """Apertus, its configuration and its converter."""

    _model_cls = NeuronApertusModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors, those of norms under their usual names."""
        names = {".attention_layernorm.": ".input_layernorm."}
        names[".feedforward_layernorm."] = ".post_attention_layernorm."
        for name in list(state_dict):
            for own, usual in names.items():
                if own in name:
                    state_dict[name.replace(own, usual)] = state_dict.pop(name)
        return state_dict
