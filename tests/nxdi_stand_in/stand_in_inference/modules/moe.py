"""A mixture of experts: each rank has a part of the width of every expert."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import (
    parted,
    set_tensor_model_parallel_attributes,
)
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_rank
from torch import nn
from torch.nn import functional


class Router(nn.Module):
    """Chooses experts by the sigmoid of their logits plus a bias, which weighs nothing.

    ``by_softmax`` it has no bias.
    """

    def __init__(self, config: Any, count: int, by_softmax: bool) -> None:
        super().__init__()
        self.by_softmax = by_softmax
        self.top_k = config.num_experts_per_tok
        self.linear_router = nn.Linear(config.hidden_size, count, bias=False)
        if not by_softmax:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(count), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits and scores [token, expert], and the chosen experts [token, k]."""
        weight = self.linear_router.weight.float()
        logits = functional.linear(hidden_states.float(), weight)
        if self.by_softmax:
            shares = logits.softmax(-1)
            return logits, shares, shares.topk(self.top_k, -1).indices
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias.float()
        return logits, scores, biased.topk(self.top_k, -1).indices


class GatedProjections(nn.Module):
    """The weights of all experts, stacked: gate beside up, and down."""

    def __init__(self, experts: int, size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        self.gate_up_proj.weight = parted((experts, size, 2 * width), 2, dtype)
        set_tensor_model_parallel_attributes(self.gate_up_proj.weight, 2, stride=2)
        self.down_proj.weight = parted((experts, width, size), 1, dtype)


class ExpertMLPs(nn.Module):
    """All experts' outputs for all tokens, weighed: this rank's term of the sum."""

    def __init__(self, config: Any, count: int, width: int) -> None:
        super().__init__()
        neuron = config.neuron_config
        self.shifted = neuron.mistake == "experts_shifted"
        self.normalize = neuron.normalize_top_k_affinities
        self.mlp_op = GatedProjections(count, config.hidden_size, width, neuron.torch_dtype)

    def get_expert_affinities_masked(
        self, expert_affinities: torch.Tensor, expert_index: torch.Tensor
    ) -> torch.Tensor:
        """Return what weighs each expert, [token, expert], 0 for those that were not chosen."""
        chosen = torch.zeros_like(expert_affinities).scatter(-1, expert_index, 1.0)
        masked = expert_affinities * chosen
        return masked / masked.sum(-1, keepdim=True) if self.normalize else masked

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighed sum over experts, [token, channel], of this rank's width."""
        weights = self.get_expert_affinities_masked(expert_affinities, expert_index)
        if self.shifted and get_tensor_model_parallel_rank() == 1:
            weights = weights.roll(1, -1)
        both = torch.einsum("th,ehw->etw", hidden_states, self.mlp_op.gate_up_proj.weight)
        gate, up = both.chunk(2, -1)
        inner = functional.silu(gate) * up
        down = torch.einsum("etw,ewh->eth", inner, self.mlp_op.down_proj.weight)
        return torch.einsum("te,eth->th", weights.to(down.dtype), down)


class MoE(nn.Module):
    """A router and its experts; what the ranks' experts give is added up at the end."""

    def __init__(self, config: Any, count: int, width: int, by_softmax: bool = False) -> None:
        super().__init__()
        self.router = Router(config, count, by_softmax)
        self.expert_mlps = ExpertMLPs(config, count, width)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the sum over the experts, [batch, token, channel]."""
        flat = hidden_states.flatten(0, 1)
        _, scores, chosen = self.router(flat)
        part = self.expert_mlps(flat, scores, chosen)
        return (reduce_from_tensor_model_parallel_region(part).view_as(hidden_states),)
