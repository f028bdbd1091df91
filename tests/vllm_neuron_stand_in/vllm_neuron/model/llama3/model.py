"""Llama: grouped queries, dense blocks."""

from __future__ import annotations

from vllm_neuron.model.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama."""


class Eagle3LlamaForCausalLM(CausalLM):
    """A draft of Llama's, which proposes tokens."""
