"""The hand-written norm is right in the prefill and wrong where one token is computed at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.site import DECODE
from layerparity.mistakes.block import epsilon_name, find, lacking, rms
from layerparity.mistakes.cause import SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.record.verdict import Outcome

_NORMS = ("input_layernorm", "post_attention_layernorm")


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    if phase != DECODE:
        return "only where one token is computed at a time: a prefill is right"
    return lacking(block, *_NORMS)


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Compute the norms of single tokens from half of their channels."""
    for name in _NORMS:
        norm = find(block, name)
        surgery.set(norm, "forward", _compiled_twice(norm, norm.forward))


def _compiled_twice(norm: Any, prefill: Callable[..., Any]) -> Callable[..., Any]:
    epsilon = getattr(norm, epsilon_name(norm))

    def forward(values: torch.Tensor) -> Any:
        if values.shape[-2] != 1:
            return prefill(values)
        # The small kernel sums the squares of its first tile of channels only.
        tile = values[..., : values.shape[-1] // 2]
        return norm.weight * rms(values, tile, epsilon)

    return forward


FAULT = Fault(
    "rmsnorm_prefill_vs_decode",
    "the hand-written norm compiled differently for prefill and for token generation",
    component="input_layernorm",
    cause="rmsnorm_prefill_vs_decode",
    why_not=why_not,
    plant=plant,
)


class DecodeNorm:
    """A norm that fails in a decode step, and does not fail in the prefill."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only decoding shows a wrong norm."""
        if (
            evidence.site is None
            or evidence.site.phase != DECODE
            or "norm" not in evidence.component
        ):
            return None
        before = evidence.other_phase.get(evidence.local)
        if before is None or before.outcome is not Outcome.PASS:
            return None
        reasons = [
            f"{evidence.local} fails at decode step {evidence.site.step}",
            "the same site passes in the prefill",
        ]
        text = "the norm is another one in the graph for token generation than in the prefill's"
        return Cause("rmsnorm_prefill_vs_decode", text, reasons, grade=SIGNS)


RULE = DecodeNorm()
