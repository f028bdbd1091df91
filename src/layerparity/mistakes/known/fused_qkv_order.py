"""Queries, keys and values are fused in another order than they are split in."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Fill q, k and v from a stack in the order k, v, q."""
    for kind in ("weight", "bias"):
        q, k, v = (find(block, f"self_attn.{name}_proj.{kind}") for name in "qkv")
        if q is None:
            continue
        fused = torch.cat([k.data, v.data, q.data])
        with torch.no_grad():
            for mine, part in zip((q, k, v), fused.split([len(q), len(k), len(v)]), strict=True):
                mine.copy_(part)


FAULT = Fault(
    "fused_qkv_order",
    "Q, K and V were fused before the rename, in the wrong order",
    component="self_attn.q_proj",
    cause="fused_qkv_order",
    by_weights=True,
    why_not=needs(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
    plant=plant,
)


NAMES = ("q_proj", "k_proj", "v_proj")


class FusedOrder:
    """Several projections of one good input are all wrong, and unrelated to the golden's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where two or three projections fail, or weights were reordered."""
        failing = [name for name in NAMES if evidence.failed(f"self_attn.{name}:out")]
        moved = [
            each
            for each in evidence.findings_of("reordered", component="self_attn")
            if each.component.endswith(NAMES)
        ]
        blamed = evidence.component.removeprefix("self_attn.") in NAMES
        if not (blamed or evidence.component == "self_attn"):
            return None
        if not moved and (len(failing) < 2 or not blamed):
            return None
        reasons = [f"{', '.join(failing)} fail on a good input"] if failing else []
        sizes = [evidence.metric("pearson", f"self_attn.{name}:out") for name in failing]
        known = [abs(size) for size in sizes if size is not None]
        if known and max(known) < 0.3:
            reasons.append(
                f"none has to do with the golden's (correlation at most {max(known):.2g})"
            )
        lost = evidence.findings_of("never_loaded", "missing")
        sure = 0.2 if lost else 0.75 if known and max(known) < 0.3 else 0.45
        if moved:
            # One alone, in another order, was not cut from a stack in the wrong place.
            wrong = {each.component for each in moved} | {f"self_attn.{name}" for name in failing}
            sure = 0.95 if len(wrong) > 1 else 0.5
        text = "the fused projection holds q, k and v in another order than it is cut in"
        return Cause("fused_qkv_order", sure, text, reasons, moved)


RULE = FusedOrder()
