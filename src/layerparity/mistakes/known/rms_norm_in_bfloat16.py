"""The whole norm is computed in bfloat16, its variance included; the model goes to float32.

`precision` recognises it: each token is right but for a small factor of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.numbers.arithmetic import Widen

_NORM = "input_layernorm"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Round what the norm is given to bfloat16, and let it compute nothing in float32."""

    def around(exact: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(values: torch.Tensor) -> torch.Tensor:
            with Widen(torch.bfloat16):
                narrow = exact(values.to(torch.bfloat16))
            return narrow.to(values.dtype)

        return forward

    surgery.wrap(find(block, _NORM), around)


FAULT = Fault(
    "rms_norm_in_bfloat16",
    "the norm's variance was computed in bfloat16, and a wide limit hid it",
    component=_NORM,
    cause="precision",
    why_not=needs(f"{_NORM}.weight"),
    plant=plant,
)
