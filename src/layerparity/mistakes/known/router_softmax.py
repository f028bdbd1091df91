"""The router scores experts by softmax where the model uses a sigmoid."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.ground.numeral import percent
from layerparity.mistakes.block import CHOICES, CORRECTION, LOGITS, WEIGHTS, find, lacking, route
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.routers import GATES, routing_of
from layerparity.mistakes.shape import factor_share


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
    """The weights are those of other scores than the golden's, from the candidate's own logits."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where another activation gives the candidate's weights."""
        if evidence.component not in GATES:
            return None
        routing = routing_of(evidence)
        if routing is None:
            return _by_outcomes(evidence)
        own, right = routing.candidate, routing.golden
        if own is None or right is None or own.score == right.score:
            return None
        reasons = [
            f"{own.score} of its own logits gives the candidate's weights to rounding",
            f"the golden's are given by {right.score}",
        ]
        text = f"the router's activation differs: {own.score} where the model uses {right.score}"
        return Cause("router_softmax", text, reasons, grade=SHOWN)


def _by_outcomes(evidence: Evidence) -> Cause | None:
    """Return the cause where weights fail on good logits, and not by one factor."""
    if evidence.failed(LOGITS) or not evidence.failed(WEIGHTS):
        return None
    if factor_share(evidence, WEIGHTS) > 0.9:
        return None
    error = evidence.metric("rel_l2", WEIGHTS)
    reasons = ["the router's logits pass and the weights made of them differ"]
    if error is not None:
        reasons.append(f"they are off by {percent(error)} where the expert sets agree")
    if evidence.failed(CHOICES):
        reasons.append("the expert sets differ as well: the scores before the bias are others")
    text = "the router's activation differs: softmax where the model uses sigmoid, or reversed"
    return Cause("router_softmax", text, reasons, grade=SIGNS)


RULE = RouterActivation()
