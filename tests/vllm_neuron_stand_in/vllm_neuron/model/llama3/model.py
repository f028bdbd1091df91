"""Llama: grouped queries, dense blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_neuron.model.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama."""


class Eagle3LlamaForCausalLM(CausalLM):
    """A draft of Llama's, which proposes tokens."""


class LlamaForConditionalGeneration(CausalLM):
    """Llama with a tower for pictures."""


class LlamaWithoutCache:
    """A class whose models cannot be given a cache."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> nn.Module:
        """Return no model of the plugin's."""
        return nn.Identity()
