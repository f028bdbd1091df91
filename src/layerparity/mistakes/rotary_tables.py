"""Rotary tables for other widths, bases and positions than the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.anatomy.sizes import sizes_of
from layerparity.mistakes.block import config_of, lacking


def parameters(config: Any) -> dict[str, Any]:
    """Return the configuration's rotary parameters; empty where it has none."""
    values: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return values


def no_plain_tables(block: nn.Module) -> str:
    """Return why other tables cannot be made for a block; or nothing, where its own are plain."""
    gone = lacking(block, "self_attn.head_dim")
    if gone:
        return gone
    known = parameters(config_of(block))
    if "rope_theta" not in known or known.get("rope_type", "default") != "default":
        return "this model's rotary tables are not the plain ones"
    return ""


def rotated_width(block: nn.Module) -> int:
    """Return how many dimensions of a head are rotated."""
    return sizes_of(config_of(block)).rotary_dims


def tables(
    positions: torch.Tensor, dims: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, both [batch, token, dims], of positions [batch, token].

    angle = position / theta^(2 i / dims), the same for dimension i and i + dims / 2
    (Su et al., RoFormer, 2021, in the halves layout).
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    angles = positions[..., None].float() / theta**exponents
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)
