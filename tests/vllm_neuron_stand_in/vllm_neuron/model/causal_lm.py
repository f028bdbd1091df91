"""What every model does: attention over a paged cache, blocks in a row, and loading."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron import functional as NF
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.nn.layers import Embedding, Head, RMSNorm, empty
from vllm_neuron.utils.checkpoints import fill
from vllm_neuron.utils.weight_loader import (
    in_loader,
    out_loader,
    pad,
    qkv_loader,
    set_weight_loader,
)

Metadata = dict[str, dict[str, Any]]


def is_prefill(told: dict[str, Any]) -> bool:
    """Say whether a pass is a prompt's."""
    return told["max_query_len"] > told["decode_token_threshold"]


class Attention(nn.Module):
    """Attention of this rank's heads: QKV in one weight, keys and values in a paged cache."""

    window: int | None = None
    sinks: torch.Tensor | None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.mistake = layer_idx, config.neuron_config.mistake
        self.group = get_tp_group()
        ranks, self.head_dim, self.dtype = self.group.world_size, config.head_dim, config.dtype
        self.heads = config.num_attention_heads // ranks
        self.keys = max(1, config.num_key_value_heads // ranks)
        width, own = config.hidden_size, self.heads * self.head_dim
        fused = own + 2 * self.keys * self.head_dim
        self.qkv_proj_weight = empty(width, fused, dtype=self.dtype)
        self.o_proj_weight = empty(own, width, dtype=self.dtype)
        self.sizes = [own, self.keys * self.head_dim, self.keys * self.head_dim]
        tiled, lost = self.mistake == "kv_heads_in_turn", self.mistake == "keys_left_out"
        loader = qkv_loader(ranks, config.num_key_value_heads, tiled, lost)
        set_weight_loader(self.qkv_proj_weight, loader)
        turned = self.mistake != "o_proj_untransposed"
        set_weight_loader(self.o_proj_weight, in_loader(ranks, turned))
        self.sinks = None
        self.first: torch.Tensor | None = None
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def normed(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries and keys as they are: most models do not norm them."""
        return queries, keys

    def projected(self, hidden: torch.Tensor, angles: Any) -> tuple[torch.Tensor, ...]:
        """Return rotated queries and keys, and values, [head, token, channel]."""
        parts = self.fused(hidden).split(self.sizes, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for each in parts)
        late = self.mistake == "norm_after_rotary"
        if not late:
            q, k = self.normed(q, k)
        q, k = NF.rotated(q, *angles), NF.rotated(k, *angles)
        if late:
            q, k = self.normed(q, k)
        return q, k, v

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values of [token, channel] beside each other."""
        return hidden @ self.qkv_proj_weight

    def out(self, context: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of the output projection of [token, channel]."""
        return context @ self.o_proj_weight

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        position_embeddings: Any,
        attn_metadata: Metadata,
        step_window: int | None = None,
    ) -> torch.Tensor:
        """Return attention's output for this rank's slice of a prompt's tokens, or for a step."""
        told = attn_metadata[f"layers.{self.layer_idx}.self_attn"]
        prompt = is_prefill(told)
        hidden = self.group.all_gather(hidden_states) if prompt else hidden_states
        q, k, v = self.projected(hidden, position_embeddings)
        self._write(k, v, told, prompt)
        window = self.window if prompt else step_window
        more = {"scale": self.head_dim**-0.5, "window": window, "sinks": self.sinks}
        if prompt:
            found = NF.flash_attention(q, k, v, **more)
        else:
            found = NF.attention_decode(q, self.cache, self._read(told), **more)
        part = self.out(found.transpose(0, 1).flatten(1))
        if self.mistake == "residual_on_each_rank" and prompt:
            part = part + hidden
        return self.group.reduce_scatter(part) if prompt else self.group.all_reduce(part)

    def _write(self, k: torch.Tensor, v: torch.Tensor, told: dict[str, Any], prompt: bool) -> None:
        slots = told["slot_mapping"]
        if prompt and self.mistake == "metadata_of_the_request_before":
            self.first = slots if self.first is None else self.first
            slots = self.first[torch.arange(len(slots)).clamp(max=len(self.first) - 1)]
        assert self.cache is not None, "no cache is bound"
        for cache, values in zip(self.cache, (k, v), strict=True):
            NF.write_cache(cache, values, slots)

    def _read(self, told: dict[str, Any]) -> dict[str, Any]:
        tables = told["block_table_tensor"]
        if self.mistake == "blocks_of_another_request":
            tables = tables.roll(1, 0)
        elif self.mistake == "off_by_one_block":
            tables = tables.roll(1, 1)
        return {**told, "block_table_tensor": tables}


class MLP(nn.Module):
    """Gate, up and down, of which each rank has a part of the width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.group = get_tp_group()
        ranks, dtype = self.group.world_size, config.dtype
        own = config.intermediate_size // ranks
        self.gate_proj_weight = empty(config.hidden_size, own, dtype=dtype)
        self.up_proj_weight = empty(config.hidden_size, own, dtype=dtype)
        self.down_proj_weight = empty(own, config.hidden_size, dtype=dtype)
        for weight in (self.gate_proj_weight, self.up_proj_weight):
            set_weight_loader(weight, out_loader(ranks))
        set_weight_loader(self.down_proj_weight, in_loader(ranks))

    def forward(self, hidden: torch.Tensor, prompt: bool) -> torch.Tensor:
        """Return the block's own part of the residual stream, of this rank's slice in a prompt."""
        hidden = self.group.all_gather(hidden) if prompt else hidden
        wide = functional.silu(hidden @ self.gate_proj_weight) * (hidden @ self.up_proj_weight)
        part = wide @ self.down_proj_weight
        return self.group.reduce_scatter(part) if prompt else self.group.all_reduce(part)


def norm_of(config: Any) -> RMSNorm:
    """Return a norm of hidden states, whose padded channels are none."""
    real = getattr(config, "real_width", config.hidden_size)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype, real)
    pad(norm.weight, {0: config.hidden_size})
    return norm


class DecoderLayer(nn.Module):
    """One block."""

    attention: type[Attention] = Attention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention(config, layer_idx)
        self.input_layernorm = norm_of(config)
        self.make_mlp(config)

    def make_mlp(self, config: Any) -> None:
        """Make the block's second half."""
        self.mlp = MLP(config)
        self.post_attention_layernorm = norm_of(config)

    def mixed(self, middle: torch.Tensor, prompt: bool) -> torch.Tensor:
        """Return the second half's own part of the residual stream."""
        return self.mlp(self.post_attention_layernorm(middle), prompt)

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        position_embeddings: Any,
        attn_metadata: Metadata,
        step_window: int | None = None,
    ) -> torch.Tensor:
        """Return the block's output, [token, channel]."""
        attended = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            positions=positions,
            position_embeddings=position_embeddings,
            attn_metadata=attn_metadata,
            step_window=step_window,
        )
        middle = hidden_states + attended
        prompt = is_prefill(next(iter(attn_metadata.values())))
        return middle + self.mixed(middle, prompt)


class Rotary(nn.Module):
    """The angles of positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        theta, size = config.rope_parameters["rope_theta"], config.head_dim
        self.frequencies, self.scale = 1.0 / theta ** (torch.arange(0, size, 2).float() / size), 1.0
        kind = config.rope_parameters.get("rope_type", "default")
        if kind != "default":
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines of positions [token], [token, channel of a head]."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


class Model(nn.Module):
    """A model without its head."""

    block: type[nn.Module] = DecoderLayer
    rotary: type[nn.Module] = Rotary

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.group, self.mistake = get_tp_group(), config.neuron_config.mistake
        made = (config.hidden_size, config.dtype)
        self.embed_tokens = Embedding(config.vocab_size, *made, self.mistake)
        blocks = [self.block(config, layer) for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = norm_of(config)
        self.rotary_emb = self.rotary(config)

    def windows(self) -> list[int | None]:
        """Return the windows of a step, of which blocks have one in turn; most models have none."""
        return [None]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Metadata,
        rank: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normed output of all tokens, [token, channel]."""
        prompt = is_prefill(attn_metadata["layers.0.self_attn"])
        hidden = self.embed_tokens(input_ids, scatter_tokens=prompt, rank=rank)
        if self.mistake == "position_of_the_longest" and not prompt:
            positions = positions.max().expand_as(positions)
        angles = self.rotary_emb(positions, hidden.dtype)
        windows = [None] if prompt else self.windows()
        for number, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                positions=positions,
                position_embeddings=angles,
                attn_metadata=attn_metadata,
                step_window=windows[number % len(windows)],
            )
        hidden = self.norm(hidden)
        return self.group.all_gather(hidden) if prompt else hidden


class CausalLM(nn.Module):
    """A model and its head."""

    body: type[Model] = Model

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, self.body(config)
        gathers = config.neuron_config.on_device_sampling_config is None
        self.lm_head = Head(config.vocab_size, config.hidden_size, config.dtype, gathers)
        self.group = get_tp_group()

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> CausalLM:
        """Return a model without weights."""
        return cls(cls.config_of(hf_config, neuron_config))

    @classmethod
    def config_of(cls, hf_config: Any, neuron_config: Any) -> Any:
        """Return a configuration of the model's own."""
        hf_config.neuron_config = neuron_config
        return hf_config

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Metadata,
        sampling_positions: torch.Tensor,
        rank: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of some tokens. Raises ValueError where ranks cannot share them."""
        ranks, told = self.group.world_size, attn_metadata["layers.0.self_attn"]
        tokens = len(input_ids)
        if is_prefill(told) and (tokens % ranks or tokens <= ranks):
            raise ValueError(f"{ranks} ranks share no prompt of {tokens} tokens")
        hidden = self.model(input_ids, positions, attn_metadata=attn_metadata, rank=rank)
        return self.lm_head(hidden[sampling_positions])

    def get_kv_spec(self) -> KVSpec:
        """Return what caches the blocks want."""
        layers = [
            LayerSpec(
                f"layers.{number}.self_attn",
                each.self_attn.keys,
                each.self_attn.head_dim,
                self.config.dtype,
                each.self_attn.window,
            )
            for number, each in enumerate(self.model.layers)
        ]
        return KVSpec(layers)

    def bind_kv_cache(self, caches: dict[str, list[torch.Tensor]]) -> None:
        """Give the blocks their caches."""
        for number, each in enumerate(self.model.layers):
            keys, values = caches[f"layers.{number}.self_attn"]
            each.self_attn.cache = (keys, values)

    def mapping(self) -> dict[str, list[str]]:
        """Return the stored tensors that parameters of another name are made of."""
        named: dict[str, list[str]] = {}
        for number in range(len(self.model.layers)):
            block = f"model.layers.{number}"
            attention, mlp = f"{block}.self_attn", f"{block}.mlp"
            three = [f"{attention}.{each}_proj.weight" for each in "qkv"]
            named[f"{attention}.qkv_proj_weight"] = three
            named[f"{attention}.o_proj_weight"] = [f"{attention}.o_proj.weight"]
            parts = ["gate", "up", "down"]
            if self.config.neuron_config.mistake == "gate_and_up_swapped":
                parts = ["up", "gate", "down"]
            for own, stored in zip(("gate", "up", "down"), parts, strict=True):
                named[f"{mlp}.{own}_proj_weight"] = [f"{mlp}.{stored}_proj.weight"]
        if self.config.tie_word_embeddings:
            named["lm_head.weight"] = ["model.embed_tokens.weight"]
        return named

    def load_weights(
        self, checkpoint_path: str, device: torch.device, cache_dir: str | None
    ) -> None:
        """Fill the model from a folder."""
        fill(self, checkpoint_path, self.group.rank_in_group, self.mapping())
