"""The weight converter deletes the router's correction bias: it stays zero."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import CHOICES, CORRECTION, LOGITS, WEIGHTS, find, needs
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Set the correction bias to zero."""
    with torch.no_grad():
        find(block, CORRECTION).zero_()


FAULT = Fault(
    "router_bias_dropped",
    "the weight converter deleted e_score_correction_bias",
    component="mlp.gate",
    cause="router_bias_dropped",
    by_weights=True,
    why_not=needs(CORRECTION),
    plant=plant,
    never_loaded=(CORRECTION,),
)


# How a checkpoint's names of such a bias end.
_BIASES = ("correction_bias", "expert_bias")


class RouterBias:
    """Other experts from equal logits; where the sets agree, the weights agree."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where choices fail, logits pass, and the model has such a bias."""
        if not (evidence.failed(CHOICES) and evidence.passed(LOGITS)):
            return None
        if evidence.tensors and not any(name.endswith(_BIASES) for name in evidence.tensors):
            return None
        agreement = evidence.metric("set_agreement", CHOICES)
        if agreement is None:
            # Another number of experts was chosen: a bias decides which, not how many.
            return None
        reasons = [
            "the router's logits pass, and the experts chosen from them differ",
            f"expert sets agree at {agreement:.0%} of the tokens",
        ]
        outside = evidence.metric("flips_outside_noise", CHOICES)
        if outside:
            reasons.append(f"{outside:.0f} flips are further from a tie than the logits' noise")
        sure = 0.85
        if evidence.weights_compared and not evidence.blamed:
            sure = 0.45
        if evidence.failed(WEIGHTS):
            sure = min(sure, 0.5)
        elif evidence.passed(WEIGHTS):
            sure = 0.92 if sure > 0.5 else 0.7
            reasons.append("where the sets agree the weights are right: scores are, only ranks not")
        lost = [
            each for each in evidence.findings_of("never_loaded", "missing") if "bias" in each.name
        ]
        if lost:
            sure = 0.98
        text = "the correction bias (e_score_correction_bias) is missing from the choice of experts"
        return Cause("router_bias_dropped", sure, text, reasons, lost)


RULE = RouterBias()
