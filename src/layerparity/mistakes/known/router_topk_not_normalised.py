"""The chosen experts' weights are not divided by their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import CHOICES, CORRECTION, LOGITS, WEIGHTS, find, lacking, route
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.shape import factor_share, percent


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, "mlp.gate")
    if gone:
        return gone
    if lacking(block, CORRECTION) and not getattr(find(block, "mlp.gate"), "norm_topk_prob", False):
        return "this model's router does not divide by the sum of the chosen"
    return ""


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Leave the chosen experts' weights as they are scored."""
    gate = find(block, "mlp.gate")
    if lacking(block, CORRECTION):
        surgery.set(gate, "norm_topk_prob", False)
        return

    def forward(hidden: torch.Tensor, bias: torch.Tensor) -> Any:
        return route(gate, hidden, bias, softmax=False, normalise=False)

    surgery.set(gate, "forward", forward)


FAULT = Fault(
    "router_topk_not_normalised",
    "the chosen experts' weights are not divided by their sum",
    component="mlp.gate",
    cause="router_topk_not_normalised",
    why_not=why_not,
    plant=plant,
)


class TopkNotNormalised:
    """The same experts with weights that are all too large (or small) by about one factor."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where router weights fail by a factor, and the sets do not differ."""
        local = WEIGHTS if evidence.failed(WEIGHTS) else "mlp.experts:out"
        ratio = evidence.metric("norm_ratio", local)
        routing_differs = evidence.failed(CHOICES) or evidence.failed(LOGITS)
        if routing_differs or not evidence.failed(local) or ratio is None:
            return None
        if abs(ratio - 1) < 0.05 or factor_share(evidence, local) < 0.8:
            return None
        reasons = [
            "the same experts are chosen",
            f"{local} is {ratio:.3g} times as large as the golden's, "
            f"and one factor explains {percent(factor_share(evidence, local))} of the error",
        ]
        text = "the weights of the chosen experts are not divided by their sum"
        return Cause("router_topk_not_normalised", 0.9 if local == WEIGHTS else 0.6, text, reasons)


RULE = TopkNotNormalised()
