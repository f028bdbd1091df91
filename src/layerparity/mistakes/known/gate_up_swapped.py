"""The gate and up halves of the gated MLP are stacked the wrong way round."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.site import within
from layerparity.ground.numeral import percent
from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.cause import WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.parts import exchange, halves, weight_halves
from layerparity.record.weights import Fate, WeightFinding

DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    if not lacking(block, *DENSE) or not lacking(block, "mlp.experts.gate_up_proj"):
        return ""
    return "this block has no gated MLP"


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Swap the gate's and the up projection's weights, and their biases."""
    experts = find(block, "mlp.experts")
    if lacking(block, "mlp.experts.gate_up_proj"):
        exchange(*(find(block, path).data for path in DENSE))
        return
    exchange(*weight_halves(experts, experts.gate_up_proj.data))
    bias = getattr(experts, "gate_up_proj_bias", None)
    if bias is not None:
        exchange(*halves(experts, bias.data))


FAULT = Fault(
    "gate_up_swapped",
    "gate and up halves stacked the wrong way round",
    component="mlp.experts",
    cause="gate_up_swapped",
    by_weights=True,
    why_not=why_not,
    plant=plant,
)


# What checkpoints call the two halves.
_GATE, _UP = {"gate_proj", "w1"}, {"up_proj", "w3"}


class GateUpSwapped:
    """The right experts with the right weights give an unrelated or much changed output."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where weights of one half are where the other's should be."""
        if not within(evidence.component, "mlp"):
            return None
        moved = [
            each for each in evidence.findings_of("reordered", component="mlp") if _swaps(each)
        ]
        if not moved:
            return None
        error = evidence.metric("rel_l2")
        reasons: list[str] = []
        if error is not None:
            reasons.append(f"{evidence.local} is off by {percent(error)} on a good input")
        pearson = evidence.metric("pearson")
        if pearson is not None:
            reasons.append(f"its correlation with the golden's is {pearson:.2f}")
        text = "gate and up are stacked the wrong way round: silu(up) * gate for silu(gate) * up"
        return Cause("gate_up_swapped", text, reasons, moved, WEIGHTS)


def _swaps(finding: WeightFinding) -> bool:
    """Say whether one half is where the other should be; another expert's is another mistake.

    Of a stack of both, and where rows of both are mixed, another order is known, but not which.
    """
    if finding.fate is Fate.MIXED_ROWS:
        return False
    own = set(finding.name.split("."))
    instead = {part for name in finding.holds for part in name.split(".")}
    return bool((own & _GATE and instead & _UP) or (own & _UP and instead & _GATE))


RULE = GateUpSwapped()
