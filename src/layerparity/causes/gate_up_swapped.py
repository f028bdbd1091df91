"""gate_up_swapped: the gate and up halves of the experts were swapped."""

from __future__ import annotations

from layerparity.causes._shape import factor_share, percent
from layerparity.causes.base import Cause, Evidence


class GateUpSwapped:
    """The right experts with the right weights give an unrelated or much changed output."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the experts' output is far off on a good input."""
        if evidence.component not in ("mlp.experts", "mlp"):
            return None
        moved = evidence.found("reordered", component="mlp")
        error = evidence.metric("rel_l2")
        if not moved and (error is None or error < 0.1 or evidence.findings):
            return None
        reasons = [each.text for each in moved]
        if error is not None:
            reasons.append(f"{evidence.local} is off by {percent(error)} on a good input")
        share = factor_share(evidence)
        if not moved and share > 0.9:
            return None
        pearson = evidence.metric("pearson")
        if pearson is not None:
            reasons.append(f"its correlation with the golden's is {pearson:.2f}")
        sure = 0.95 if moved else 0.6 if error is not None and error > 0.4 else 0.4
        text = "gate and up are stacked the wrong way round: silu(up) * gate for silu(gate) * up"
        return Cause("gate_up_swapped", sure, text, reasons)


RULE = GateUpSwapped()
