"""Positions count padding: those of left-padded rows are not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layerparity.mistakes.block import needs
from layerparity.mistakes.cause import Cause, Evidence
from layerparity.mistakes.fault import Fault, Pass
from layerparity.mistakes.shape import median


def change_arguments(arguments: Mapping[str, Any], given: Pass) -> dict[str, Any]:
    """Return rotary tables whose positions count the padding."""
    seen, new = given.attention_mask.shape[1], given.position_ids.shape[1]
    counted = torch.arange(seen - new, seen).expand_as(given.position_ids)
    changed = {**arguments, "position_embeddings": given.tables(counted)}
    if "position_ids" in arguments:
        changed["position_ids"] = counted
    return changed


FAULT = Fault(
    "position_ids_wrong",
    "positions count the padding on the left",
    component="self_attn",
    cause="position_ids_wrong",
    why_not=needs("self_attn.head_dim"),
    arguments=change_arguments,
)


class PositionIds:
    """Only rows with padding are wrong: their positions, masks or last tokens are shifted."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where padded rows fail and full ones do not."""
        rows, padded = evidence.tokens.sequence, evidence.tokens.padded
        errors = evidence.errors
        if not padded or len(rows) != len(errors) or not set(rows) - padded:
            return None
        inside = median([e for e, row in zip(errors, rows, strict=True) if row in padded])
        outside = median([e for e, row in zip(errors, rows, strict=True) if row not in padded])
        if inside == 0 or inside < 10 * outside:
            return None
        reasons = [
            f"rows with padding are off by {inside:.2g}, rows without by {outside:.2g} (medians)"
        ]
        sure = 0.95 if evidence.part == "rotary" else 0.8
        if evidence.part == "rotary":
            reasons.append("queries and keys pass before they are rotated and fail after")
        text = "the positions or the mask of padded rows are wrong: padding is counted as tokens"
        return Cause("position_ids_wrong", sure, text, reasons)


RULE = PositionIds()
