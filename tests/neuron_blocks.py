"""Small decoder blocks with random weights, and what a model passes to them, made on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

BATCH, TOKENS = 2, 12


def command(**keys: Any) -> SimpleNamespace:
    """Return the part of a command's configuration that a backend reads."""
    unset = (
        "attn_implementation",
        "experts_implementation",
        "max_memory",
        "offload_folder",
        "threads",
    )
    device_map = SimpleNamespace(strategy="auto")
    usual = {
        "tp_degree": 1,
        "moe_ep_degree": 1,
        "device_map": device_map,
        "generate": SimpleNamespace(max_new_tokens=0),
        **dict.fromkeys(unset),
    }
    return SimpleNamespace(**{**usual, **keys})


def minimax(experts: str = "eager", attention: str = "sdpa", **keys: Any) -> Any:
    """Return a small MiniMax-M2 configuration with half of each head rotated."""
    from transformers import MiniMaxM2Config

    config = MiniMaxM2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=1,
        **keys,
    )
    config._attn_implementation = attention
    config._experts_implementation = experts
    return config


def llama(**keys: Any) -> Any:
    """Return a small Llama configuration with biases, so that both kinds of bias are sharded."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    }
    config = LlamaConfig(**{**sizes, **keys})
    config._attn_implementation = "sdpa"
    return config


def qwen3_moe(experts: str = "static", **keys: Any) -> Any:
    """Return a small Qwen3-MoE configuration with narrow experts."""
    from transformers import Qwen3MoeConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(**{**sizes, **keys})
    config._attn_implementation = "sdpa"
    config._experts_implementation = experts
    return config


def _classes(config: Any) -> tuple[Any, Any]:
    """Return the classes of a configuration's decoder layer and of its rotary embedding."""
    from transformers.models.llama import modeling_llama as llamas
    from transformers.models.minimax_m2 import modeling_minimax_m2 as minimaxes
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwens

    return {
        "llama": (llamas.LlamaDecoderLayer, llamas.LlamaRotaryEmbedding),
        "minimax_m2": (minimaxes.MiniMaxM2DecoderLayer, minimaxes.MiniMaxM2RotaryEmbedding),
        "qwen3_moe": (qwens.Qwen3MoeDecoderLayer, qwens.Qwen3MoeRotaryEmbedding),
    }[config.model_type]


def block(config: Any, index: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return one decoder block; its own update is about as large as its input."""
    torch.manual_seed(index)
    made: nn.Module = _classes(config)[0](config, index)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2)
    if config.model_type == "minimax_m2":
        made.mlp.e_score_correction_bias.copy_(8.5 + 0.3 * torch.randn(8))  # type: ignore
    return made.eval().requires_grad_(False).to(dtype)


def given(config: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return hidden states [batch, token, channel] and a block's keyword arguments."""
    torch.manual_seed(9)
    hidden = torch.randn(BATCH, TOKENS, config.hidden_size).to(dtype)
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    causal = torch.full((TOKENS, TOKENS), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return hidden, {
        "attention_mask": causal.expand(BATCH, 1, TOKENS, TOKENS).contiguous(),
        "position_ids": positions,
        "position_embeddings": _classes(config)[1](config)(hidden, positions),
    }


class Watched(nn.Module):
    """A block as a function that returns (output, {site: tensor}), filled by hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, hidden: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        seen: dict[str, Any] = {}

        def watch(name: str, module: nn.Module) -> Any:
            def note(_: Any, __: Any, output: Any) -> None:
                seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

            return module.register_forward_hook(note)

        handles = [watch(name, getattr(self.inner, name)) for name in ("self_attn", "mlp")]
        try:
            output = self.inner(hidden, **arguments)
        finally:
            for handle in handles:
                handle.remove()
        return output, seen


def rel_l2(candidate: torch.Tensor, golden: torch.Tensor) -> float:
    """Return ||candidate - golden|| / ||golden||."""
    difference = candidate.double() - golden.double()
    return float(difference.norm() / golden.double().norm())
