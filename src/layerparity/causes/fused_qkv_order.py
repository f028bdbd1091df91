"""fused_qkv_order: queries, keys and values were fused in another order."""

from __future__ import annotations

from layerparity.causes.base import Cause, Evidence

NAMES = ("q_proj", "k_proj", "v_proj")


class FusedOrder:
    """Several projections of one good input are all wrong, and unrelated to the golden's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where two or three projections fail, or weights were reordered."""
        failing = [name for name in NAMES if evidence.failed(f"self_attn.{name}:out")]
        moved = [
            each
            for each in evidence.found("reordered", component="self_attn")
            if each.component.endswith(NAMES)
        ]
        blamed = evidence.component.removeprefix("self_attn.") in NAMES
        if not (blamed or evidence.component == "self_attn"):
            return None
        if not moved and (len(failing) < 2 or not blamed):
            return None
        reasons = [f"{', '.join(failing)} fail on a good input"] if failing else []
        reasons += [each.text for each in moved]
        sizes = [evidence.metric("pearson", f"self_attn.{name}:out") for name in failing]
        known = [abs(size) for size in sizes if size is not None]
        if known and max(known) < 0.3:
            reasons.append(
                f"none has to do with the golden's (correlation at most {max(known):.2g})"
            )
        lost = evidence.found("never_loaded", "missing")
        sure = 0.2 if lost else 0.75 if known and max(known) < 0.3 else 0.45
        if moved:
            # One alone, in another order, was not cut from a stack in the wrong place.
            wrong = {each.component for each in moved} | {f"self_attn.{name}" for name in failing}
            sure = 0.95 if len(wrong) > 1 else 0.5
        text = "the fused projection holds q, k and v in another order than it is cut in"
        return Cause("fused_qkv_order", sure, text, reasons)


RULE = FusedOrder()
