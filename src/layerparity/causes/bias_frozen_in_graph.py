"""bias_frozen_in_graph: a buffer was baked into the compiled graph as a constant."""

from __future__ import annotations

from layerparity.causes.base import Cause, Evidence


class FrozenConstant:
    """The effective weight is one constant, where the checkpoint has values."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a weight finding says constant."""
        found = evidence.found("constant", component=evidence.component)
        if not found:
            return None
        text = (
            f"{found[0].name} was baked into the compiled graph before the checkpoint was loaded, "
            "and never updated: make it an input of the graph, or load before tracing"
        )
        return Cause("bias_frozen_in_graph", 0.97, text, [each.text for each in found])


RULE = FrozenConstant()
