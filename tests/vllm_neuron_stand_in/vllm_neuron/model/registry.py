"""The models there are, by the name that config.json has for them."""

from __future__ import annotations


def get_models() -> list[tuple[str, type]]:
    """Return each name with its class."""
    from vllm_neuron.model.gpt_oss.factory import GptOssForCausalLM
    from vllm_neuron.model.llama3.model import Eagle3LlamaForCausalLM, LlamaForCausalLM
    from vllm_neuron.model.qwen3.factory import Qwen3ForCausalLM

    return [
        ("LlamaForCausalLM", LlamaForCausalLM),
        ("Eagle3LlamaForCausalLM", Eagle3LlamaForCausalLM),
        ("Qwen3ForCausalLM", Qwen3ForCausalLM),
        ("GptOssForCausalLM", GptOssForCausalLM),
    ]
