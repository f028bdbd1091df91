"""A LayerNorm stands where the model has an RMSNorm: the mean is subtracted."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import epsilon_name, find, needs
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import layer_normed, norm_check

_NORM = "input_layernorm"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Subtract each token's mean before the norm."""
    norm: Any = find(block, _NORM)
    exact, epsilon = norm.forward, getattr(norm, epsilon_name(norm))

    def forward(values: torch.Tensor) -> torch.Tensor:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        # What has no mean any more is normed as before.
        centred = layer_normed(wide, epsilon).to(values.dtype)
        normed: torch.Tensor = exact(centred)
        return normed

    surgery.set(norm, "forward", forward)


FAULT = Fault(
    "layer_norm_for_rms_norm",
    "a LayerNorm stands where the model has an RMSNorm",
    component=_NORM,
    cause="layer_norm_for_rms_norm",
    why_not=needs(f"{_NORM}.weight"),
    plant=plant,
)


class LayerNorm:
    """The golden is an RMSNorm, and a LayerNorm of the same weight gives the candidate."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where subtracting the mean gives the candidate's numbers."""
        check = norm_check(evidence)
        if check is None or not check.shows(partial(layer_normed, epsilon=check.epsilon)):
            return None
        reasons = ["each token less its mean, divided and weighed so, gives its numbers"]
        text = "a LayerNorm stands where the model has an RMSNorm: the mean is subtracted"
        return Cause("layer_norm_for_rms_norm", text, reasons, grade=SHOWN)


RULE = LayerNorm()
