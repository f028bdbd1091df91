"""The chosen experts' weights are not divided by their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.ground.numeral import numeral, percent
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
    """One side's weights are the scores of the chosen as they are, the other's are divided."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where scores that were not divided give the candidate's weights."""
        if evidence.component not in GATES:
            return None
        routing = routing_of(evidence)
        if routing is None:
            return _by_size(evidence)
        own, right = routing.candidate, routing.golden
        if own is None or right is None or own.divided == right.divided:
            return None
        how, text = ("divided", _DIVIDED) if own.divided else ("not divided", _TEXT)
        reasons = [
            f"{own.score} of its own logits, {how}, gives the candidate's weights to rounding"
        ]
        return Cause("router_topk_not_normalised", text, reasons, grade=SHOWN)


_TEXT = "the weights of the chosen experts are not divided by their sum"
_DIVIDED = "the weights of the chosen experts are divided by their sum, and the model's are not"


def _by_size(evidence: Evidence) -> Cause | None:
    """Return the cause where the same experts' weights are off by nearly one factor."""
    ratio = evidence.metric("norm_ratio", WEIGHTS)
    if not evidence.failed(WEIGHTS) or evidence.failed(CHOICES) or evidence.failed(LOGITS):
        return None
    share = factor_share(evidence, WEIGHTS)
    if ratio is None or abs(ratio - 1) < 0.05 or not 0.8 < share < 0.999:
        # A pure factor is a factor: sums differ from token to token.
        return None
    reasons = [
        "the same experts are chosen",
        f"{WEIGHTS} is {numeral(ratio)} times as large as the golden's, "
        f"and one factor explains {percent(share)} of the error",
    ]
    return Cause("router_topk_not_normalised", _TEXT, reasons, grade=SIGNS)


RULE = TopkNotNormalised()
