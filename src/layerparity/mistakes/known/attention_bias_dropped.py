"""The biases of the attention's projections were dropped while the weights were sharded.

Where no weights are told, `offset` shows the constant that is missing.
"""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.site import overlap
from layerparity.mistakes.block import find, needs
from layerparity.mistakes.cause import WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery

_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkvo")


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Leave all four biases at zero, as they were made."""
    with torch.no_grad():
        for path in _BIASES:
            bias = find(block, path)
            if bias is not None:
                bias.zero_()


FAULT = Fault(
    "attention_bias_dropped",
    "sharding the checkpoint removed the biases of the attention's projections",
    component="self_attn.q_proj",
    cause="attention_bias_dropped",
    by_weights=True,
    why_not=needs(_BIASES[0]),
    plant=plant,
    never_loaded=_BIASES,
)


class BiasDropped:
    """Biases of the attention's projections never came, and their weights did."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only biases of the guilty attention are missing."""
        if not evidence.component.startswith("self_attn"):
            return None
        lost = evidence.findings_of("never_loaded", component="self_attn")
        biases = [each for each in lost if each.name.endswith("_proj.bias")]
        own = any(overlap(each.component, evidence.component) for each in biases)
        if not own or len(biases) < len(lost):
            return None
        names = ", ".join(each.name.rpartition("self_attn.")[2] for each in biases)
        text = f"{names} never reached the graph, and the weights beside them did: biases dropped"
        return Cause("attention_bias_dropped", text, findings=biases, grade=WEIGHTS)


RULE = BiasDropped()
