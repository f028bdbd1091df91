"""The weight converter deletes the router's correction bias: it stays zero."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import CHOICES, CORRECTION, LOGITS, WEIGHTS, find, needs
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.cause import WEIGHTS as HELD
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.routers import GATES, routing_of


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
    """The experts chosen are those of the largest scores; the golden's are not, by a bias."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the bias has no part in the candidate's choice, and should."""
        if evidence.component not in GATES:
            return None
        if evidence.tensors and not any(name.endswith(_BIASES) for name in evidence.tensors):
            # The model has none.
            return None
        lost = [
            each for each in evidence.findings_of("never_loaded", "missing") if "bias" in each.name
        ]
        if lost:
            return Cause("router_bias_dropped", _TEXT, findings=lost, grade=HELD)
        routing = routing_of(evidence)
        if routing is None:
            return _by_outcomes(evidence)
        if routing.golden_largest > _MOSTLY or routing.candidate_largest < 1:
            # Without a bias at work there is none to drop; and another choice has another reason.
            return None
        reasons = [
            "the candidate's experts are those of its largest scores, at every token",
            f"the golden's are at {routing.golden_largest:.0%} of them: a bias decides there",
        ]
        return Cause("router_bias_dropped", _TEXT, reasons, grade=SHOWN)


# A golden that chooses the largest scores at more tokens shows no bias that rounding does not.
_MOSTLY = 0.95
_TEXT = "the correction bias (e_score_correction_bias) is missing from the choice of experts"


def _by_outcomes(evidence: Evidence) -> Cause | None:
    """Return the cause where choices fail on good logits and, where sets agree, weights pass."""
    if not (evidence.failed(CHOICES) and evidence.passed(LOGITS) and evidence.passed(WEIGHTS)):
        return None
    if evidence.weights_compared:
        return None
    agreement = evidence.metric("set_agreement", CHOICES)
    if agreement is None:
        # Another number of experts was chosen: a bias decides which, not how many.
        return None
    reasons = [
        "the router's logits pass, and the experts chosen from them differ",
        f"expert sets agree at {agreement:.0%} of the tokens",
        "where the sets agree the weights are right: scores are, only ranks not",
    ]
    return Cause("router_bias_dropped", _TEXT, reasons, grade=SIGNS)


RULE = RouterBias()
