"""Compute experts without data-dependent shapes, for compilers such as Neuron's.

Every expert computes every token and a dense routing matrix keeps what the router chose: no sort,
no ``nonzero``, no gather of weights. Experts go in chunks of bounded memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NAME = "static"

# Copies of a chunk's weights and activations stay below: 8 experts of MiniMax-M2 at 256 tokens.
CHUNK_BYTES = 256 * 2**20


def register() -> None:
    """Offer these experts to transformers as ``experts_implementation="static"``; idempotent."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)


def forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's chosen experts.

    ``experts`` is a transformers experts module with stacked weights. ``hidden_states`` is
    [tokens, hidden]; ``top_k_index`` (integer) and ``top_k_weights`` are [tokens, k]; an index
    past the last expert counts for nothing. Returns [tokens, hidden] in the dtype of
    ``hidden_states``; the sum over experts is made in float32 or wider.
    """
    wide = torch.promote_types(torch.float32, hidden_states.dtype)
    every = torch.arange(experts.num_experts, device=top_k_index.device).view(-1, 1, 1)
    matches = top_k_index.unsqueeze(0) == every
    # Who was chosen, and with what weight: both [expert, token, 1].
    chosen = matches.any(dim=-1, keepdim=True)
    weights = torch.where(matches, top_k_weights.to(wide).unsqueeze(0), 0.0)
    weights = weights.sum(dim=-1, keepdim=True)
    total = torch.zeros_like(hidden_states, dtype=wide)
    step = chunk_size(experts, hidden_states)
    for first in range(0, experts.num_experts, step):
        part = slice(first, min(first + step, experts.num_experts))
        outputs = _outputs(experts, hidden_states, part).to(wide) * weights[part]
        # A token an expert was not chosen for may overflow in it: 0 * inf would spoil the sum.
        total = total + torch.where(chosen[part], outputs, 0.0).sum(dim=0)
    return total.to(hidden_states.dtype)


def chunk_size(experts: Any, hidden_states: torch.Tensor) -> int:
    """Return how many experts are computed at once; all of them where they fit CHUNK_BYTES.

    ``hidden_states`` is [token, hidden], of any floating dtype.
    """
    up, down = _up_weight(experts), experts.down_proj
    weights = (up[0].numel() + down[0].numel()) * up.element_size()
    widest = max(*up.shape[1:], *down.shape[1:])
    # Alive at once: the projection, its gated half, the output and its float32 copy.
    activations = 4 * hidden_states.shape[0] * widest * 4
    fitting: int = CHUNK_BYTES // (weights + activations)
    return max(1, min(int(experts.num_experts), fitting))


def _outputs(experts: Any, tokens: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the unweighted outputs of a chunk of experts, [chunk, tokens, hidden]."""
    bias = experts.gate_up_proj_bias if experts.has_bias and experts.has_gate else None
    if experts.has_bias and not experts.has_gate:
        bias = experts.up_proj_bias
    inner = _project(tokens, _up_weight(experts), bias, part, experts.is_transposed)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    bias = experts.down_proj_bias if experts.has_bias else None
    outputs = _project(inner, experts.down_proj, bias, part, experts.is_transposed)
    return experts.post_expert_norm(outputs) if experts.has_post_expert_norm else outputs


def _up_weight(experts: Any) -> nn.Parameter:
    weight: nn.Parameter = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return weight


def _project(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    part: slice,
    is_transposed: bool,
) -> torch.Tensor:
    """Multiply [tokens, in] or [chunk, tokens, in] by a chunk of stacked weights."""
    chunk = weight[part] if is_transposed else weight[part].transpose(-1, -2)
    product = torch.matmul(values, chunk)
    return product if bias is None else product + bias[part].unsqueeze(1)
