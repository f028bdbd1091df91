"""Every token goes to the first experts, whatever its router's logits say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.mistakes.block import CHOICES, find, needs
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.routers import GATES
from layerparity.mistakes.values import ENOUGH


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Let the router choose experts 0, 1, ... for each token, with the weights of its own."""

    def around(route: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            logits, weights, chosen = route(*args)
            first = torch.arange(chosen.shape[-1], device=chosen.device)
            return logits, weights, first.to(chosen.dtype).expand_as(chosen)

        return forward

    surgery.wrap(find(block, "mlp.gate"), around)


FAULT = Fault(
    "first_experts_always",
    "the routing was ignored: every token went to the first experts",
    component="mlp.gate",
    cause="first_experts_always",
    why_not=needs("mlp.gate.top_k"),
    plant=plant,
)


class FirstAlways:
    """The candidate chooses experts 0, 1, ... for every token, and the golden does not."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the candidate's choice never depends on the token."""
        choices = evidence.values(CHOICES) if evidence.component in GATES else None
        if choices is None or len(choices.candidate) < ENOUGH:
            return None
        sides = [each.long().sort(-1).values for each in (choices.golden, choices.candidate)]
        first = torch.arange(sides[0].shape[-1]).expand_as(sides[0])
        # A router that happens to choose them for a few tokens does so on both sides.
        if not torch.equal(sides[1], first) or torch.equal(sides[0], first):
            return None
        last = first.shape[-1] - 1
        text = f"the router's choice is ignored: every token goes to experts 0 to {last}"
        reasons = [f"all {len(first)} tokens have the same choice, and the golden's differ"]
        return Cause("first_experts_always", text, reasons, grade=SHOWN)


RULE = FirstAlways()
