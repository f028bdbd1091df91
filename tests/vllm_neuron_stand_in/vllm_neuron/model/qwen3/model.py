"""Qwen3: queries and keys are normed by head before they are rotated."""

from __future__ import annotations

from typing import Any

import torch

from vllm_neuron.model.causal_lm import Attention, CausalLM, DecoderLayer, Model
from vllm_neuron.nn.layers import RMSNorm


class Qwen3Attention(Attention):
    """Attention with norms."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.dtype)

    def normed(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return normed queries and keys, computed as one kernel would: no hook sees them."""
        return self.q_norm.forward(queries), self.k_norm.forward(keys)


class Qwen3Layer(DecoderLayer):
    """One block."""

    attention = Qwen3Attention


class Qwen3Model(Model):
    """Qwen3 without its head."""

    block = Qwen3Layer


class Qwen3(CausalLM):
    """Qwen3."""

    body = Qwen3Model
