"""Queries, keys and values are fused in another order than they are split in."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.mistakes.block import find, needs
from layerparity.mistakes.cause import SHOWN, WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.record.weights import Fate


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
# Channels that were found again, of those that there are.
_MOST = 0.98


class FusedOrder:
    """Channels of one projection are given out by another, or weights were reordered among them."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where q, k and v give out each other's channels."""
        blamed = evidence.component.removeprefix("self_attn.") in NAMES
        if not (blamed or evidence.component == "self_attn"):
            return None
        text = "the fused projection holds q, k and v in another order than it is cut in"
        moved = [
            each
            for each in evidence.findings_of("reordered", component="self_attn")
            # One that holds its own values in another order was cut where it should be.
            if each.component.endswith(NAMES) and each.fate is not Fate.OTHER_ORDER
        ]
        failing = [name for name in NAMES if evidence.failed(f"self_attn.{name}:out")]
        reasons = [f"{', '.join(failing)} fail on a good input"] if failing else []
        share = _found_elsewhere(evidence)
        if share is not None and share >= _MOST:
            pair = _exchanged(evidence)
            if pair:
                # Whether they were fused in another order or put in each other's place is one.
                named = f"{pair[0]} and {pair[1]} give out each other's numbers: exchanged, or cut "
                named += "from a stack of another order"
                return Cause("projections_exchanged", named, reasons, moved, SHOWN)
            reasons.append("their channels are those of another of the three, to rounding")
            return Cause("fused_qkv_order", text, reasons, moved, SHOWN)
        # One alone, in another order, was not cut from a stack in the wrong place.
        wrong = {each.component for each in moved} | {f"self_attn.{name}" for name in failing}
        if not moved or len(wrong) < 2 or share is not None:
            return None
        return Cause("fused_qkv_order", text, reasons, moved, WEIGHTS)


def _exchanged(evidence: Evidence) -> tuple[str, str] | None:
    """Return the two of q, k and v that give out each other's numbers, the third its own."""
    stored = {name: evidence.values(f"self_attn.{name}:out") for name in NAMES}
    known = {name: each for name, each in stored.items() if each is not None}
    right = [name for name, each in known.items() if each.is_golden(each.candidate)]
    pair = [name for name in known if name not in right]
    if len(pair) != 2 or len(right) != 1:
        return None
    one, other = (known[name] for name in pair)
    if one.golden.shape != other.golden.shape:
        return None
    return (pair[0], pair[1]) if one.shows(other.golden) and other.shows(one.golden) else None


def _found_elsewhere(evidence: Evidence) -> float | None:
    """Return the share of the candidate's wrong channels that the golden's other two hold.

    None where the outputs are not at hand; 0 where no channel stands in another projection.
    """
    stored = [evidence.values(f"self_attn.{name}:out") for name in NAMES]
    if any(each is None for each in stored):
        return None
    known = [each for each in stored if each is not None]
    golden = torch.cat([each.golden.flatten(1) for each in known], 1)
    candidate = torch.cat([each.candidate.flatten(1) for each in known], 1)
    owner = torch.cat([torch.full((len(v.golden[0].flatten()),), n) for n, v in enumerate(known)])
    limit = 2 * max(each.limit for each in known)
    distances = torch.cdist(candidate.T, golden.T) / golden.norm(dim=0).clamp(min=1e-300)
    wrong = distances.diagonal() > limit
    nearest = distances.min(dim=1)
    found = (nearest.values <= limit)[wrong]
    elsewhere = (owner[nearest.indices] != owner)[wrong]
    if not bool(wrong.any()) or not bool((found & elsewhere).any()):
        return 0.0
    return float(found.double().mean())


RULE = FusedOrder()
