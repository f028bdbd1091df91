"""Chooses the variant of Qwen3."""

from __future__ import annotations

from typing import Any

from vllm_neuron.model.qwen3.model import Qwen3


class Qwen3ForCausalLM:
    """Makes Qwen3 in the type that a configuration asks for."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> Qwen3:
        """Return a model without weights. Raises ValueError for another variant."""
        if neuron_config.quantization not in (None, "bf16"):
            raise ValueError(f"there is no variant {neuron_config.quantization}")
        return Qwen3.from_configs(hf_config, neuron_config)
