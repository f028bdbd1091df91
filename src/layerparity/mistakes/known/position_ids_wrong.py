"""Positions count padding: those of left-padded rows are not shifted."""

from __future__ import annotations

import torch

from layerparity.anatomy.block import ROTARY
from layerparity.ground.numeral import numeral
from layerparity.mistakes.block import needs
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass
from layerparity.mistakes.shape import median
from layerparity.mistakes.turning import same_angles, turning_of


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
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
    """Only rows with padding are turned wrongly, each by the angles of other positions."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where padded rows are turned wrongly and full ones are not."""
        if evidence.part != ROTARY:
            return None
        rows, padded = evidence.tokens.sequence, evidence.tokens.padded
        errors = evidence.errors
        if not padded or len(rows) != len(errors) or not set(rows) - padded:
            return None
        inside = median([e for e, row in zip(errors, rows, strict=True) if row in padded])
        outside = median([e for e, row in zip(errors, rows, strict=True) if row not in padded])
        if inside == 0 or inside < 10 * outside:
            return None
        reasons = [
            f"rows with padding are off by {numeral(inside, 2)}, rows without by "
            f"{numeral(outside, 2)} (medians)",
            "queries and keys pass before they are rotated and fail after",
        ]
        turning = turning_of(evidence)
        if turning is not None:
            full = torch.tensor([row not in padded for row in rows])
            if not same_angles(turning, full) or not turning.turns(turning.dims):
                return None
            reasons.append("full rows are turned as the golden's, padded ones by other angles")
        text = "the positions or the mask of padded rows are wrong: padding is counted as tokens"
        grade = SIGNS if turning is None else SHOWN
        return Cause("position_ids_wrong", text, reasons, grade=grade)


RULE = PositionIds()
