"""A block's weights as matrices [expert, row, column] that can be written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.block import SERIAL
from layerparity.mistakes.block import CORRECTION, find

# Of an MLP, the modules that are components of their own, under either name of a router.
_INNER = ("mlp.gate", "mlp.router", "mlp.experts")


def halves(
    experts: Any, both: torch.Tensor, outputs: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's part of what is stacked along axis ``outputs``.

    Views of ``both`` [..., 2n, ...], each [..., n, ...] in its dtype: writing to them writes to it.
    """
    aligned = both.movedim(outputs, -1)
    if getattr(experts, "is_concatenated", True):
        gate, up = aligned.chunk(2, dim=-1)
    else:
        gate, up = aligned[..., ::2], aligned[..., 1::2]
    return gate.movedim(-1, outputs), up.movedim(-1, outputs)


def exchange(left: torch.Tensor, right: torch.Tensor) -> None:
    """Swap the values of two tensors of one shape and dtype, in place."""
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


def weight_halves(experts: Any, stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's part of a weight [expert, row, column] as views."""
    return halves(experts, stacked, -1 if getattr(experts, "is_transposed", False) else -2)


@dataclass(frozen=True)
class Part:
    """One weight of a block, as a user would name it.

    ``path`` is the parameter's inside the block, ``half`` the gate's or the up projection's share
    of a stacked one. Vectors have one column; what is no expert's has one expert.
    """

    name: str
    component: str
    path: str
    half: int | None = None

    def view(self, block: nn.Module) -> torch.Tensor:
        """Return the weight [expert, row, column] in its dtype, sharing the parameter's memory."""
        value: torch.Tensor = find(block, self.path).data
        experts = find(block, "mlp.experts")
        if self.half is not None:
            value = weight_halves(experts, value)[self.half]
        if value.dim() == 3 and getattr(experts, "is_transposed", False):
            value = value.transpose(1, 2)
        if value.dim() == 1:
            value = value.unsqueeze(-1)
        return value if value.dim() == 3 else value.unsqueeze(0)

    def fits(self, block: nn.Module, expert: int = 0, row: int = 0, column: int = 0) -> str:
        """Return why a place in the weight does not exist in a block; or nothing."""
        if find(block, self.path) is None:
            return f"this block has no {self.name}"
        shape = self.view(block).shape
        if any(i >= n for i, n in zip((expert, row, column), shape, strict=True)):
            return f"{self.name} is {list(shape)} in this block"
        return ""


def parts(block: nn.Module) -> list[Part]:
    """Return the weights of a block in the order in which a forward pass reaches them."""
    weights: list[Part] = []
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() <= 2:
            component = "mlp" if name.startswith("mlp.") and name not in _INNER else name
            weights.append(Part(name, component, f"{name}.weight"))
    if find(block, CORRECTION) is not None:
        weights.append(Part("mlp.gate.bias", "mlp.gate", CORRECTION))
    if find(block, "mlp.experts.gate_up_proj") is not None:
        weights.append(Part("mlp.experts.gate", "mlp.experts", "mlp.experts.gate_up_proj", half=0))
        weights.append(Part("mlp.experts.up", "mlp.experts", "mlp.experts.gate_up_proj", half=1))
        weights.append(Part("mlp.experts.down", "mlp.experts", "mlp.experts.down_proj"))

    def place(part: Part) -> tuple[bool, int]:
        """Return a part's place in a forward pass; what is a dense MLP's comes last."""
        component = part.component.replace("mlp.router", "mlp.gate")
        return component == "mlp", SERIAL.rank_of_module(component)

    return sorted(weights, key=place)
