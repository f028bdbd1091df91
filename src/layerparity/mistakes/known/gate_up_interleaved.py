"""Gate and up are stacked row by row, and split in halves; or the other way about.

The weights' prints show it, as they do any weight in another order.
"""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.known.gate_up_swapped import DENSE, why_not
from layerparity.mistakes.parts import halves, weight_halves


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Write the rows of gate and up in turn where each should have them in a row, or undo that."""
    experts = find(block, "mlp.experts")
    with torch.no_grad():
        if lacking(block, "mlp.experts.gate_up_proj"):
            gate, up = (find(block, path).data for path in DENSE)
            _mix(gate, up, 0, interleaved=False)
            return
        interleaved = not getattr(experts, "is_concatenated", True)
        axis = -1 if getattr(experts, "is_transposed", False) else -2
        _mix(*weight_halves(experts, experts.gate_up_proj.data), axis, interleaved)
        bias = getattr(experts, "gate_up_proj_bias", None)
        if bias is not None:
            _mix(*halves(experts, bias.data), -1, interleaved)


def _mix(gate: torch.Tensor, up: torch.Tensor, axis: int, interleaved: bool) -> None:
    """Write into both [..., n, ...] what they get from a stack that is split the other way.

    ``interleaved`` says that the model splits it by every second of the rows along ``axis``.
    """
    count = gate.shape[axis]
    if interleaved:
        stacked = torch.cat([gate, up], axis)
        every = torch.arange(2 * count, device=gate.device)
        parts = [stacked.index_select(axis, every[start::2]) for start in (0, 1)]
    else:
        first = gate.movedim(axis, -1)
        mixed = torch.stack([first, up.movedim(axis, -1)], -1).flatten(-2)
        parts = [each.movedim(-1, axis) for each in mixed.chunk(2, -1)]
    for half, part in zip((gate, up), parts, strict=True):
        half.copy_(part)


FAULT = Fault(
    "gate_up_interleaved",
    "gate and up were stacked row by row, where the model splits their stack in halves",
    component="mlp.experts",
    cause="weights_altered",
    by_weights=True,
    why_not=why_not,
    plant=plant,
)
