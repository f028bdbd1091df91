"""GPT-OSS: experts, sinks, biases, a window in every second block; hidden states are padded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.causal_lm import Attention, CausalLM, DecoderLayer, Model, norm_of
from vllm_neuron.nn.layers import empty
from vllm_neuron.utils.weight_loader import (
    WeightLoader,
    pad,
    qkv_loader,
    rows_loader,
    set_weight_loader,
)

# Channels come in so many.
_WIDE = 48


class GptOssAttention(Attention):
    """Attention with biases, and a score for each head that nothing has."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        ranks, wide = self.group.world_size, config.hidden_size
        self.config_window = config.sliding_window
        self.window = None if layer_idx % 2 else self.config_window
        self.sinks = empty(self.heads, dtype=self.dtype)
        set_weight_loader(self.sinks, rows_loader(ranks))
        self.qkv_proj_bias = empty(sum(self.sizes), dtype=self.dtype)
        set_weight_loader(self.qkv_proj_bias, qkv_loader(ranks, config.num_key_value_heads))
        # Each rank adds its part of the bias, for their sum is taken.
        self.o_proj_bias = empty(wide, dtype=self.dtype)
        set_weight_loader(self.o_proj_bias, WeightLoader(lambda slices, _: slices[0][:] / ranks))
        pad(self.qkv_proj_weight, {0: wide})
        pad(self.o_proj_weight, {1: wide})
        pad(self.o_proj_bias, {0: wide})

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values of [token, channel] beside each other."""
        return hidden @ self.qkv_proj_weight + self.qkv_proj_bias

    def out(self, context: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of the output projection of [token, channel]."""
        return context @ self.o_proj_weight + self.o_proj_bias


class Router(nn.Module):
    """Chooses experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        count = config.num_local_experts
        self.weight = empty(count, config.hidden_size, dtype=config.dtype)
        self.bias = empty(count, dtype=config.dtype)
        self.chosen = config.num_experts_per_tok
        self.dropped = config.neuron_config.mistake == "router_bias_dropped"
        pad(self.weight, {1: config.hidden_size})

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits [token, expert], and weights and numbers of the chosen [token, k]."""
        logits = functional.linear(hidden, self.weight, None if self.dropped else self.bias)
        best, choices = logits.topk(self.chosen, -1)
        return logits, best.softmax(-1), choices


class Experts(nn.Module):
    """Experts of which each rank has a part of the width, gate and up beside each other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.group = get_tp_group()
        ranks, dtype, wide = self.group.world_size, config.dtype, config.hidden_size
        count, own = config.num_local_experts, config.intermediate_size // ranks
        self.gate_up_proj = empty(count, wide, 2 * own, dtype=dtype)
        self.gate_up_proj_bias = empty(count, 2 * own, dtype=dtype)
        self.down_proj = empty(count, own, wide, dtype=dtype)
        self.down_proj_bias = empty(count, wide, dtype=dtype)
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha

        def of_rank(axis: int, width: int) -> WeightLoader:
            return WeightLoader(lambda got, rank: got[0][:].narrow(axis, rank * width, width))

        set_weight_loader(self.gate_up_proj, of_rank(2, 2 * own))
        set_weight_loader(self.gate_up_proj_bias, of_rank(1, 2 * own))
        set_weight_loader(self.down_proj, of_rank(1, own))
        part = WeightLoader(lambda slices, _: slices[0][:] / ranks)
        set_weight_loader(self.down_proj_bias, part)
        for parameter, dim in (
            (self.gate_up_proj, 1),
            (self.down_proj, 2),
            (self.down_proj_bias, 1),
        ):
            pad(parameter, {dim: wide})

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's term of the chosen experts' weighed sum, [token, channel]."""
        total = torch.zeros_like(hidden)
        for number in choices.unique().tolist():
            share = (weights * (choices == number)).sum(-1, keepdim=True)
            both = hidden @ self.gate_up_proj[number] + self.gate_up_proj_bias[number]
            gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2]
            up = up.clamp(-self.limit, self.limit) + 1
            wide = up * gate * torch.sigmoid(gate * self.alpha)
            found = wide @ self.down_proj[number] + self.down_proj_bias[number]
            total = total + found * share
        return total


class GptOssMLP(nn.Module):
    """Norms what it is fed, routes it and asks the experts; in a step as one kernel would."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.post_attention_layernorm = norm_of(config)
        self.router, self.experts = Router(config), Experts(config)
        self.group = get_tp_group()

    def forward(self, hidden: torch.Tensor, prompt: bool) -> torch.Tensor:
        """Return the block's own part of the residual stream, of this rank's slice in a prompt."""
        if not prompt:
            normed = self.post_attention_layernorm.forward(hidden)
            _, weights, choices = self.router.forward(normed)
            return self.group.all_reduce(self.experts.forward(normed, weights, choices))
        normed = self.group.all_gather(self.post_attention_layernorm(hidden))
        _, weights, choices = self.router(normed)
        return self.group.reduce_scatter(self.experts(normed, weights, choices))


class GptOssLayer(DecoderLayer):
    """One block."""

    attention = GptOssAttention

    def make_mlp(self, config: Any) -> None:
        """Make the block's second half, which has its norm."""
        self.mlp = GptOssMLP(config)

    def mixed(self, middle: torch.Tensor, prompt: bool) -> torch.Tensor:
        """Return the second half's own part of the residual stream."""
        return self.mlp(middle, prompt)


class GptOssModel(Model):
    """GPT-OSS without its head."""

    block = GptOssLayer

    def windows(self) -> list[int | None]:
        """Return those of even and odd blocks; the first block has its own."""
        return [self.layers[0].self_attn.config_window, None]


class GptOss(CausalLM):
    """GPT-OSS."""

    body = GptOssModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for parameter in (self.model.embed_tokens.weight, self.lm_head.weight):
            pad(parameter, {1: config.hidden_size})

    @classmethod
    def config_of(cls, hf_config: Any, neuron_config: Any) -> Any:
        """Return a configuration of padded channels."""
        made = copy.copy(super().config_of(hf_config, neuron_config))
        made.real_width = made.hidden_size
        made.hidden_size = -(-made.hidden_size // _WIDE) * _WIDE
        return made

    def mapping(self) -> dict[str, list[str]]:
        """Return the stored tensors that parameters of another name are made of."""
        named = super().mapping()
        for number in range(len(self.model.layers)):
            block = f"model.layers.{number}"
            attention = f"{block}.self_attn"
            three = [f"{attention}.{each}_proj.bias" for each in "qkv"]
            named[f"{attention}.qkv_proj_bias"] = three
            named[f"{attention}.o_proj_bias"] = [f"{attention}.o_proj.bias"]
            norm = "post_attention_layernorm.weight"
            named[f"{block}.mlp.{norm}"] = [f"{block}.{norm}"]
        return named
