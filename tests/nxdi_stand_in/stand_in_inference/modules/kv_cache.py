"""Keys and values of the tokens so far, a row a sequence, padded to the longest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stand_in_inference.modules.heads import sharded_heads


class KVCacheManager(nn.Module):
    """Holds K and V of each layer, [batch, head, room, channel], on this rank."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        neuron = config.neuron_config
        self.mistake = neuron.mistake
        heads = sharded_heads(config).keys // neuron.tp_degree
        shape = (neuron.batch_size, heads, neuron.seq_len, config.head_dim)
        blank = torch.zeros(shape, dtype=neuron.torch_dtype)
        count = 2 * config.num_hidden_layers
        rows = [nn.Parameter(blank.clone(), requires_grad=False) for _ in range(count)]
        self.past_key_values = nn.ParameterList(rows)

    def get_kv_by_layer_id(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, the first ``length`` positions."""
        keys, values = self.past_key_values[2 * layer : 2 * layer + 2]
        return keys[:, :, :length], values[:, :, :length]

    def update_kv_by_layer_id(
        self,
        layer: int,
        new: tuple[torch.Tensor, torch.Tensor],
        seq_ids: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return a layer's keys and values with new ones: in a step, at its token's position.

        A prefill's stand in front, for what pads them has no position of its own.
        """
        made = []
        for old, fresh in zip(self.past_key_values[2 * layer : 2 * layer + 2], new, strict=True):
            whole = old.clone()
            places = position_ids if position_ids.shape[1] == 1 else torch.arange(fresh.shape[2])
            if self.mistake == "step_one_slot_early" and position_ids.shape[1] == 1:
                places = places - 1
            places = places.expand(len(fresh), -1)[:, None, :, None].expand(fresh.shape)
            whole[seq_ids] = whole[seq_ids].scatter(2, places, fresh.to(whole.dtype))
            made.append(whole)
        return made
