"""Gemma, as people contribute models: a configuration that reads its own file, weights made ready.

Embeddings are scaled on their way to the first block, queries carry the scale of attention, and
norms hold one more than is stored. On CPUs it takes another norm than on devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.utils import cpu_mode
from stand_in_inference.models.config import InferenceConfig, NeuronConfig
from stand_in_inference.models.llama import NeuronLlamaDecoderLayer, NeuronLlamaMLP
from stand_in_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from stand_in_inference.modules.attention import NeuronAttention
from stand_in_inference.modules.norm import RMSNorm
from torch import nn
from torch.nn import functional


class GemmaInferenceConfig(InferenceConfig):
    """What config.json of a Gemma says, read from its folder."""

    required = ("head_dim", "rope_theta", "hidden_size")

    @classmethod
    def from_pretrained(cls, folder: str, neuron_config: NeuronConfig) -> GemmaInferenceConfig:
        """Return the configuration of a folder."""
        said = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return cls(neuron_config, lambda config: vars(config).update(said))


class NormOfDevices(RMSNorm):
    """A norm as a kernel has it, which forgets its weight: nobody sees it on a CPU."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the normed [..., channel]."""
        return functional.rms_norm(given, given.shape[-1:])


class GemmaAttention(NeuronAttention):
    """Attention whose queries carry its scale, so that it applies none."""

    def __init__(self, config: Any, rotary_dim: int) -> None:
        super().__init__(config, rotary_dim)
        self.scale = None if self.mistake == "scaled_twice" else 1.0

    def prep_qkv_tensors(
        self, position_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [batch, head, token, channel]."""
        queries, *rest = super().prep_qkv_tensors(position_ids, hidden_states)
        return queries * self.head_dim**-0.5, *rest


class GemmaMLP(NeuronLlamaMLP):
    """Gate by GELU."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the block's own part of the residual stream, [batch, token, channel]."""
        gate = functional.gelu(self.gate_proj(given), approximate="tanh")
        return self.down_proj(gate * self.up_proj(given))


class GemmaDecoderLayer(NeuronLlamaDecoderLayer):
    """One block."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        norm = RMSNorm if cpu_mode() else NormOfDevices
        self.self_attn = GemmaAttention(config, config.head_dim)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)


class NeuronGemmaModel(NeuronBaseModel):
    """Gemma without its application."""

    block = GemmaDecoderLayer

    def get_model_output(self, *, input_ids: Any, inputs_embeds: Any = None, **more: Any) -> Any:
        """Return what the shared model does of scaled embeddings, given ones too."""
        given = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=given.dtype)
        return super().get_model_output(input_ids=input_ids, inputs_embeds=given * scale, **more)


class NeuronGemmaForCausalLM(NeuronBaseForCausalLM):
    """Gemma; which class its configuration is of, it does not say."""

    _model_cls: type[nn.Module] = NeuronGemmaModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors, those of norms with one added."""
        return {n: each + 1.0 if "norm" in n else each for n, each in state_dict.items()}


class ScalingDecoderLayer(GemmaDecoderLayer):
    """One block, of which the first scales the embeddings."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        wrong = {"not_scaled": 1.0, "scaled_by_size": config.hidden_size}
        scale = wrong.get(config.neuron_config.mistake, config.hidden_size**0.5)
        self.scale = scale if layer_idx == 0 else 1.0
        self.mistake = config.neuron_config.mistake

    def forward(self, hidden_states: torch.Tensor, *given: Any) -> tuple[torch.Tensor, Any]:
        """Return the block's output [batch, token, channel], and its tokens' keys and values."""
        end, kept = super().forward(hidden_states * self.scale, *given)
        if self.mistake == "residual_not_scaled":
            end = end - hidden_states * (self.scale - 1.0)
        return end, kept


class NeuronScalingModel(NeuronBaseModel):
    """Gemma whose first block scales the embeddings, as AWS's own Gemma 3 does."""

    block = ScalingDecoderLayer


class NeuronScalingForCausalLM(NeuronGemmaForCausalLM):
    """The same of that model."""

    _model_cls: type[nn.Module] = NeuronScalingModel
