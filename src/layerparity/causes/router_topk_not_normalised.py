"""router_topk_not_normalised: the chosen weights are not divided by their sum."""

from __future__ import annotations

from layerparity.causes._shape import factor_share, percent
from layerparity.causes.base import Cause, Evidence

CHOICES, LOGITS, WEIGHTS = "mlp.gate:choices", "mlp.gate:logits", "mlp.gate:weights"


class TopkNotNormalised:
    """The same experts with weights that are all too large (or small) by about one factor."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where router weights fail by a factor, and the sets do not differ."""
        local = WEIGHTS if evidence.failed(WEIGHTS) else "mlp.experts:out"
        ratio = evidence.metric("norm_ratio", local)
        routing_differs = evidence.failed(CHOICES) or evidence.failed(LOGITS)
        if routing_differs or not evidence.failed(local) or ratio is None:
            return None
        if abs(ratio - 1) < 0.05 or factor_share(evidence, local) < 0.8:
            return None
        reasons = [
            "the same experts are chosen",
            f"{local} is {ratio:.3g} times as large as the golden's, "
            f"and one factor explains {percent(factor_share(evidence, local))} of the error",
        ]
        text = "the weights of the chosen experts are not divided by their sum"
        return Cause("router_topk_not_normalised", 0.9 if local == WEIGHTS else 0.6, text, reasons)


RULE = TopkNotNormalised()
