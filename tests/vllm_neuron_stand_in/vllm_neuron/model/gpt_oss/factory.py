"""Chooses the variant of GPT-OSS."""

from __future__ import annotations

from typing import Any

from vllm_neuron.model.gpt_oss.model import GptOss


class GptOssForCausalLM:
    """Makes GPT-OSS in the type that a configuration asks for."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> GptOss:
        """Return a model without weights. Raises ValueError for another variant than bf16."""
        if neuron_config.quantization not in (None, "bf16"):
            raise ValueError(f"there is no variant {neuron_config.quantization}")
        return GptOss.from_configs(hf_config, neuron_config)
