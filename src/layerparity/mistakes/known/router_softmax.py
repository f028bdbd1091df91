"""The router scores experts by softmax where the model uses a sigmoid."""

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
    # A correction bias beside the router is what marks the sigmoid ones.
    return "this model's router uses softmax by design" if lacking(block, CORRECTION) else ""


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Score experts by softmax."""
    gate = find(block, "mlp.gate")

    def forward(hidden: torch.Tensor, bias: torch.Tensor) -> Any:
        return route(gate, hidden, bias, softmax=True, normalise=True)

    surgery.set(gate, "forward", forward)


FAULT = Fault(
    "router_softmax",
    "softmax where the model uses sigmoid",
    component="mlp.gate",
    cause="router_softmax",
    why_not=why_not,
    plant=plant,
)


class RouterActivation:
    """Equal logits, and weights that differ by more than a factor where the sets agree."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where router weights fail, and not by one factor."""
        if evidence.failed(LOGITS):
            return None
        if not evidence.failed(WEIGHTS):
            return _from_choices(evidence)
        share = factor_share(evidence, WEIGHTS)
        if share > 0.9:
            return None
        error = evidence.metric("rel_l2", WEIGHTS)
        reasons = ["the router's logits pass and the weights made of them differ"]
        if error is not None:
            reasons.append(f"they are off by {percent(error)} where the expert sets agree")
        if share:
            reasons.append(
                f"one factor explains only {percent(share)} of it: not a missing scaling"
            )
        sure = 0.8
        if evidence.failed(CHOICES):
            sure = 0.88
            reasons.append("the expert sets differ as well: the scores before the bias are others")
        text = "the router's activation differs: softmax where the model uses sigmoid, or reversed"
        return Cause("router_softmax", sure, text, reasons)


def _from_choices(evidence: Evidence) -> Cause | None:
    """Return the cause where no token is left whose weights could be compared."""
    apart = evidence.failed(CHOICES) and evidence.passed(LOGITS) and not evidence.passed(WEIGHTS)
    if not apart or not evidence.weights_compared or evidence.blamed:
        return None
    agreement = evidence.metric("set_agreement", CHOICES)
    if agreement is None:
        return None
    reasons = [
        "the router's logits pass, and the experts chosen from them differ",
        f"expert sets agree at {agreement:.0%} of the tokens",
        "all weights, the router's bias among them, are the checkpoint's",
    ]
    text = "the router's activation differs: softmax where the model uses sigmoid, or reversed"
    return Cause("router_softmax", 0.75, text, reasons)


RULE = RouterActivation()
