"""Find the modules, weights and constants of a block that faults change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.mistakes.fault import WhyNot

CORRECTION = "mlp.e_score_correction_bias"
# What a router gives out, by its address inside the block.
CHOICES, LOGITS, WEIGHTS = "mlp.gate:choices", "mlp.gate:logits", "mlp.gate:weights"


def find(block: nn.Module, path: str) -> Any:
    """Return a module, parameter or buffer by its path inside the block, or None."""
    owner: Any = block
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def lacking(block: nn.Module, *paths: str) -> str:
    """Return which of some paths the block does not have, as a reason; or nothing."""
    gone = [path for path in paths if find(block, path) is None]
    return f"this block has no {gone[0]}" if gone else ""


def needs(*paths: str) -> WhyNot:
    """Return a ``why_not`` that wants these modules or weights in the block."""
    return lambda block, dtype, phase: lacking(block, *paths)


def head_dim(block: nn.Module) -> int:
    """Return the width of one attention head; 0 where the block has no such attention."""
    return int(find(block, "self_attn.head_dim") or 0)


def config_of(block: nn.Module) -> Any:
    """Return the model's configuration, which its attention holds; or None."""
    return find(block, "self_attn.config")


def spans_heads(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why a fault of one norm over all heads changes nothing in a block; or nothing."""
    gone = lacking(block, "self_attn.q_norm", "self_attn.k_norm")
    if gone:
        return gone
    if find(block, "self_attn.q_norm.weight").numel() == head_dim(block):
        return "this model's q_norm is one for each head by design"
    return ""


def epsilon_name(norm: nn.Module) -> str:
    """Return what a norm calls its epsilon."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


def rms(values: torch.Tensor, over: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide values [..., n] by the root mean square of ``over`` [..., m], in float32 or wider."""
    wide = torch.promote_types(values.dtype, torch.float32)
    mean = over.to(wide).square().mean(-1, keepdim=True)
    return (values.to(wide) * torch.rsqrt(mean + epsilon)).to(values.dtype)


def route(
    gate: Any, hidden: torch.Tensor, bias: torch.Tensor, softmax: bool, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route [tokens, hidden] as a router with a correction bias does.

    Returns logits [tokens, experts], and the chosen experts' weights and ids [tokens, k].
    """
    flat = hidden.reshape(-1, gate.hidden_dim).to(gate.weight.dtype)
    logits = functional.linear(flat, gate.weight)
    scores = logits.float().softmax(-1) if softmax else logits.float().sigmoid()
    _, chosen = torch.topk(scores + bias, gate.top_k, dim=-1, sorted=False)
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, chosen


def randomise(weight: torch.Tensor, deviation: float, generator: torch.Generator) -> None:
    """Fill a floating weight of any shape in place, as an initialisation would: normal, mean 0."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
