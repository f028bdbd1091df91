"""position_ids_wrong: padded rows count their positions from the padding."""

from __future__ import annotations

from layerparity.causes._shape import median
from layerparity.causes.base import Cause, Evidence


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
