"""What every model does: masks, positions, the cache, and one pass through its blocks."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from stand_in_inference.modules.kv_cache import KVCacheManager
from stand_in_inference.modules.norm import RMSNorm
from torch import nn


class NeuronBaseModel(nn.Module):
    """The model whose forward would be compiled; its blocks are of the class ``block``."""

    block: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        neuron = config.neuron_config
        self.sequence_parallel_enabled = neuron.sequence_parallel_enabled
        self.max_length = self.n_positions = neuron.seq_len
        size, dtype = config.hidden_size, neuron.torch_dtype
        self.embed_tokens = ParallelEmbedding(config.vocab_size, size, dtype)
        self.embed_tokens.everybody_is_rank_0 = neuron.mistake == "embedding_of_rank_0"
        self.embed_tokens.collect_output = not self.sequence_parallel_enabled
        blocks = [self.block(config, layer) for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        made = {"bias": False, "gather_output": not neuron.on_device_sampling, "dtype": dtype}
        self.lm_head = ColumnParallelLinear(size, config.vocab_size, **made)
        self.lm_head.everybody_is_rank_0 = neuron.mistake == "head_of_rank_0"
        self.kv_mgr = KVCacheManager(config)

    def _is_context_encoding(self, input_ids: torch.Tensor) -> bool:
        return input_ids.shape[-1] > 1

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits of each row's last token, and each layer's keys and values."""
        encodes = self._is_context_encoding(input_ids)
        hidden, kept = self.get_model_output(
            input_ids=input_ids,
            attention_mask=self.create_attn_mask(attention_mask, encodes, False, position_ids),
            position_ids=position_ids,
            seq_ids=seq_ids,
            inputs_embeds=inputs_embeds,
            update_cache=True,
            is_for_context_encoding=encodes,
            padding_mask=self.create_padding_mask(position_ids),
            num_queries=None,
        )
        last = hidden[torch.arange(len(hidden)), position_ids.argmax(1).clamp(max=hidden.shape[1])]
        return self.lm_head(last[:, None]), kept

    def create_attn_mask(
        self,
        attention_mask: torch.Tensor,
        is_for_context_encoding: bool,
        is_for_speculation: bool,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Return what each token may attend to, bool [batch, 1, token, bucket].

        In a prefill, the tokens before it and itself; in a decode step, what the cache holds.
        """
        seen = attention_mask.bool()[:, None, None]
        if not is_for_context_encoding:
            return seen
        tokens = attention_mask.shape[1]
        return seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def create_padding_mask(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return which tokens are real, bool [batch, token]: their positions ascend."""
        before = position_ids.new_full((len(position_ids), 1), -1)
        return torch.diff(position_ids, prepend=before) > 0

    def get_model_output(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        update_cache: bool = False,
        is_for_context_encoding: bool = False,
        padding_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the normed output [batch, token, channel], and each layer's keys and values.

        Where ranks share the tokens, of the last token alone.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.sequence_parallel_enabled:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
        kept: list[torch.Tensor] = []
        for number, block in enumerate(self.layers):
            cached = None
            if not is_for_context_encoding:
                cached = self.kv_mgr.get_kv_by_layer_id(number, self.n_positions)
            hidden, new = block(hidden, attention_mask, position_ids, cached)
            if update_cache:
                kept += self.kv_mgr.update_kv_by_layer_id(number, new, seq_ids, position_ids)
        hidden = self.norm(hidden)
        if self.sequence_parallel_enabled:
            _ = more["num_queries"]
            last = position_ids.argmax(1)
            hidden = gather_from_sequence_parallel_region(hidden)[torch.arange(len(last)), last]
            hidden = hidden[:, None]
        return hidden, kept


class NeuronBaseForCausalLM:
    """An application: a model, its configuration, and the converter of its checkpoint."""

    _model_cls: Any = None

    @classmethod
    def get_config_cls(cls) -> Any:
        """Return the class of its configuration."""
        raise NotImplementedError

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: Any
    ) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors under the names, and in the shapes, of the modules."""
        raise NotImplementedError

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, torch.Tensor]) -> None:
        """Give the head the embedding's weight."""
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()
