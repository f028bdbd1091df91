"""The chosen experts are added up unweighted: their weights became a mask of ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import WEIGHTS, find, needs
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.routers import GATES


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Let the router give each chosen expert a weight of one."""

    def around(route: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            logits, weights, chosen = route(*args)
            return logits, torch.ones_like(weights), chosen

        return forward

    surgery.wrap(find(block, "mlp.gate"), around)


FAULT = Fault(
    "routing_weights_masked",
    "the routing weights were applied as a mask of zeros and ones",
    component="mlp.gate",
    cause="routing_weights_masked",
    why_not=needs("mlp.gate.top_k"),
    plant=plant,
)


class Masked:
    """All weights of the candidate's choices are one, and the golden's are not."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where every chosen expert counts once."""
        weights = evidence.values(WEIGHTS) if evidence.component in GATES else None
        if weights is None or not weights.shows(torch.ones_like(weights.candidate)):
            return None
        text = "the chosen experts are added up unweighted: their weights became a mask of ones"
        reasons = ["every weight of the candidate is 1, and the golden's are not"]
        return Cause("routing_weights_masked", text, reasons, grade=SHOWN)


RULE = Masked()
