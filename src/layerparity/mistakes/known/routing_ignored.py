"""Every token goes through all experts, added up unweighted, whatever its router chose.

The router itself is right. What the other experts would have given is stored nowhere, so no rule
recognises it from stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Give the experts a choice of all of them, each with a weight of one."""
    experts = find(block, "mlp.experts")
    count = len(experts.down_proj)

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
            every = torch.arange(count, device=chosen.device).expand(len(chosen), -1)
            return exact(
                hidden, every.to(chosen.dtype), torch.ones_like(every, dtype=weights.dtype)
            )

        return forward

    surgery.wrap(experts, around)


FAULT = Fault(
    "routing_ignored",
    "the experts took no notice of the router: each token went through all of them",
    component="mlp.experts",
    cause="routing_ignored",
    why_not=needs("mlp.experts.down_proj"),
    plant=plant,
)
