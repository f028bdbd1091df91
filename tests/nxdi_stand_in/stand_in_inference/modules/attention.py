"""Attention of which each rank has some heads: projections, norms, rotary, prefill and decode."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_rank
from neuronxcc.nki.kernels import flash_fwd
from torch import nn
from torch.nn import functional

from stand_in_inference.modules.heads import sharded_heads
from stand_in_inference.modules.norm import AllHeadsNorm, RMSNorm


class GroupQueryAttentionQKV(nn.Module):
    """The projections to queries, keys and values of this rank's heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, neuron = sharded_heads(config), config.neuron_config
        self.tiled = neuron.mistake == "kv_tiled"
        self.sequence_parallel_enabled = neuron.sequence_parallel_enabled
        bias = bool(getattr(config, "attention_bias", False))
        made = {"bias": bias, "gather_output": False, "dtype": neuron.torch_dtype}
        counts = {"q": self.heads.queries, "k": self.heads.keys, "v": self.heads.keys}
        for name, count in counts.items():
            size = count * config.head_dim
            setattr(self, f"{name}_proj", ColumnParallelLinear(config.hidden_size, size, **made))

    def preshard_hook(self, state: dict[str, torch.Tensor], name: str) -> bool:
        """Rename the three projections' tensors; pad query heads and repeat key heads."""
        inner = name.removesuffix("weight")
        outer = inner.removesuffix("qkv_proj.")
        for end in ("weight", "bias"):
            for letter in "qkv":
                stored = state.pop(f"{outer}{letter}_proj.{end}", None)
                if stored is None:
                    continue
                if letter == "q":
                    stored = self.heads.pad_queries(stored, 0)
                else:
                    stored = self.heads.repeat_keys(stored, self.tiled)
                state[f"{inner}{letter}_proj.{end}"] = stored
        return True

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [batch, token, channel] of this rank."""
        if self.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        return tuple(getattr(self, f"{each}_proj")(hidden_states) for each in "qkv")


class GroupQueryAttentionOutput(nn.Module):
    """The projection of what attention found; it takes the heads as they are padded."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, neuron = sharded_heads(config), config.neuron_config
        self.o_proj = RowParallelLinear(
            self.heads.queries * config.head_dim,
            config.hidden_size,
            bias=bool(getattr(config, "attention_bias", False)),
            reduce_output=neuron.mistake != "missing_reduction",
            dtype=neuron.torch_dtype,
            sequence_parallel_enabled=neuron.sequence_parallel_enabled,
        )
        self.o_proj.bias_on_each_rank = neuron.mistake == "bias_on_each_rank"

    def preshard_hook(self, state: dict[str, torch.Tensor], name: str) -> bool:
        """Rename the projection's tensors, and pad the columns of its weight."""
        inner = name.removesuffix("weight")
        for end in ("weight", "bias"):
            stored = state.pop(f"{inner}{end}", None)
            if stored is not None:
                padded = self.heads.pad_queries(stored, 1) if end == "weight" else stored
                state[f"{inner}o_proj.{end}"] = padded
        return True

    def forward(self, attention_output: torch.Tensor) -> torch.Tensor:
        """Return the projection of [batch, token, channel]."""
        return self.o_proj(attention_output)


class NeuronAttention(nn.Module):
    """Attention of this rank's heads; queries and keys may be normed: by head, or all together.

    ``scale`` is what scores are multiplied by; None: the usual one.
    """

    scale: float | None = None

    def __init__(self, config: Any, rotary_dim: int, qk_norm: str = "") -> None:
        super().__init__()
        self.config, neuron, heads = config, config.neuron_config, sharded_heads(config)
        self.mistake, self.rotary_dim, self.qk_norm = neuron.mistake, rotary_dim, qk_norm
        self.theta, self.head_dim = config.rope_theta, config.head_dim
        self.num_heads = heads.queries // neuron.tp_degree
        self.num_key_value_heads = heads.keys // neuron.tp_degree
        self.qkv_proj = GroupQueryAttentionQKV(config)
        if qk_norm == "head":
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        elif qk_norm:
            own = (self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim)
            whole = (heads.stored_queries * self.head_dim, heads.keys * self.head_dim)
            alone = neuron.mistake == "per_rank_norm"
            self.q_norm = AllHeadsNorm(own[0], whole[0], config.rms_norm_eps, alone)
            self.k_norm = AllHeadsNorm(own[1], whole[1], config.rms_norm_eps, alone)
        self.o_proj = GroupQueryAttentionOutput(config)

    def prep_qkv_tensors(
        self, position_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [batch, head, token, channel] as attention reads them."""
        queries, keys, values = self.qkv_proj(hidden_states)
        if self.qk_norm and self.qk_norm != "head":
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        heads = [each.unflatten(-1, (-1, self.head_dim)) for each in (queries, keys, values)]
        if self.qk_norm == "head":
            heads[:2] = [self.q_norm(heads[0]), self.k_norm(heads[1])]
        by_head = [each.transpose(1, 2) for each in heads]
        exponents = torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim
        angles = position_ids[:, None, :, None].float() / self.theta**exponents
        angles = torch.cat([angles, angles], -1)
        return self._turned(by_head[0], angles), self._turned(by_head[1], angles), by_head[2]

    def _turned(self, heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate the first channels of each head, by float32 angles in the heads' type."""
        turning, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = turning.chunk(2, -1)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        turned = turning * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([turned, rest], -1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return attention's output [batch, token, channel], and these tokens' keys and values."""
        self._break_down()
        queries, keys, values = self.prep_qkv_tensors(position_ids, hidden_states)
        all_keys, all_values, mask = keys, values, attention_mask
        if past_key_value is not None:
            # The new token is no part of the cache yet, and sees itself.
            old_keys, old_values = past_key_value
            if self.mistake == "cache_of_first_row":
                old_keys = old_keys[:1].expand_as(old_keys)
            all_keys = torch.cat([old_keys, keys], 2)
            all_values = torch.cat([old_values, values], 2)
            mask = functional.pad(mask, (0, keys.shape[2]), value=True)
        times = self.num_heads // self.num_key_value_heads
        seen = functional.scaled_dot_product_attention(
            queries,
            all_keys.repeat_interleave(times, 1),
            all_values.repeat_interleave(times, 1),
            attn_mask=mask,
            scale=self.scale,
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2)), (keys, values)

    def _break_down(self) -> None:
        """Do what stops a run, where that is the mistake."""
        if self.mistake == "needs_kernel":
            flash_fwd()
        if self.mistake == "rank_dies" and get_tensor_model_parallel_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
