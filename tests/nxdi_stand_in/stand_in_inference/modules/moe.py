"""A mixture of experts: each rank has a part of the width of every expert, or of some of them."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.modules.moe.moe_process_group import (
    get_moe_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
)
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import (
    parted,
    set_tensor_model_parallel_attributes,
)
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
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
    """The weights of a rank's experts, stacked: gate beside up, and down.

    ``ranks`` share the width of each.
    """

    def __init__(
        self, experts: int, size: int, width: int, dtype: torch.dtype, ranks: int | None
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        gate_up = parted((experts, size, 2 * width), 2, dtype, ranks)
        set_tensor_model_parallel_attributes(gate_up, 2, stride=2, count=ranks)
        self.gate_up_proj.weight = gate_up
        self.down_proj.weight = parted((experts, width, size), 1, dtype, ranks)

    def mark_expert_parallel(self, distribution: list[list[int]] | None) -> None:
        """Say that the ranks share these experts by number, and of a distribution, how."""
        for each in self.parameters():
            each.expert_model_parallel, each.expert_distribution = True, distribution

    def forward(self, given: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the outputs [expert, channel] of chosen experts for one token, [channel]."""
        both = torch.einsum("h,ehw->ew", given, self.gate_up_proj.weight[experts])
        gate, up = both.chunk(2, -1)
        inner = functional.silu(gate) * up
        return torch.einsum("ew,ewh->eh", inner, self.down_proj.weight[experts])


class ExpertMLPs(nn.Module):
    """All experts' outputs for all tokens, weighed: this rank's term of the sum."""

    def __init__(self, config: Any, count: int, width: int) -> None:
        super().__init__()
        neuron = config.neuron_config
        tp, ep = neuron.moe_tp_degree, neuron.moe_ep_degree
        self.shifted = neuron.mistake == "experts_shifted"
        self.undivided = neuron.mistake == "loaded_experts_undivided"
        self.normalize = neuron.normalize_top_k_affinities
        self.local = list(range(count))
        if ep > 1:
            init_tensor_expert_parallel_moe_process_groups(tp, ep, tp, ep)
            part = parallel_state.get_expert_parallel_rank_from_global_rank(
                get_tensor_model_parallel_rank(), get_moe_ep_group()
            )
            self.local = parallel_state.get_experts_for_expert_parallel_rank(part, count, ep)
        self.mlp_op = GatedProjections(
            len(self.local),
            config.hidden_size,
            width,
            neuron.torch_dtype,
            tp if ep > 1 else None,
        )
        if ep > 1:
            parts = [
                parallel_state.get_experts_for_expert_parallel_rank(each, count, ep)
                for each in range(ep)
            ]
            wrong = neuron.mistake == "experts_of_next_rank"
            # The second group loads what the one behind it should.
            moved = [parts[0], parts[2 % ep], *parts[2:]]
            self.mlp_op.mark_expert_parallel(moved if wrong else None)

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
        count = expert_affinities.shape[-1]
        # Where ranks share experts by number, a chosen one may be another rank's.
        if len(self.local) == count and expert_index.numel() < count:
            return self.forward_selective_loading(hidden_states, expert_affinities, expert_index)
        weights = self.get_expert_affinities_masked(expert_affinities, expert_index)
        if self.shifted and get_tensor_model_parallel_rank() == 1:
            weights = weights.roll(1, -1)
        weights = weights[:, self.local]
        both = torch.einsum("th,ehw->etw", hidden_states, self.mlp_op.gate_up_proj.weight)
        gate, up = both.chunk(2, -1)
        inner = functional.silu(gate) * up
        down = torch.einsum("etw,ewh->eth", inner, self.mlp_op.down_proj.weight)
        return torch.einsum("te,eth->th", weights.to(down.dtype), down)

    def forward_selective_loading(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the same of so few tokens that the chosen experts alone are loaded."""
        chosen = expert_affinities[torch.arange(len(hidden_states))[:, None], expert_index]
        if self.normalize and not self.undivided:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        rows = [
            (self.mlp_op(each, expert_index[row]) * chosen[row][:, None].to(each.dtype)).sum(0)
            for row, each in enumerate(hidden_states)
        ]
        return torch.stack(rows)


class MoE(nn.Module):
    """A router and its experts; what the ranks' experts give is added up at the end."""

    def __init__(self, config: Any, count: int, width: int, by_softmax: bool = False) -> None:
        super().__init__()
        self.router = Router(config, count, by_softmax)
        self.expert_mlps = ExpertMLPs(config, count, width)
        self.sequence_parallel_enabled = config.neuron_config.sequence_parallel_enabled

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the sum over the experts, [batch, token, channel]."""
        if self.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        flat = hidden_states.flatten(0, 1)
        _, scores, chosen = self.router(flat)
        part = self.expert_mlps(flat, scores, chosen).view_as(hidden_states)
        if self.sequence_parallel_enabled:
            return (reduce_scatter_to_sequence_parallel_region(part),)
        return (reduce_from_tensor_model_parallel_region(part),)
