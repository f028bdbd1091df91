"""degenerate_output: one side's tensor is zero, one number, denormal or NaN everywhere."""

from __future__ import annotations

from layerparity.ground.numeral import numeral
from layerparity.mistakes.cause import SHOWN, Cause, Evidence

_NEVER = "it was never written, or its buffer was baked into the graph"
# By metric: what such a tensor is, and how one comes about.
_WORDS = {
    "nonfinite": (
        "NaN or Inf everywhere",
        "it was never written, or a 0 / 0 reaches every number",
    ),
    "denormal": (
        "denormal numbers alone, next to nothing",
        "it was never written, or its bits were read as another type",
    ),
}


class DegenerateOutput:
    """The tensor itself says it: a computation gives no such values by rounding."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a side of the guilty site holds nothing that was computed."""
        candidate = _called(evidence, "candidate")
        if candidate:
            text = f"the candidate's tensor is {candidate}"
            return Cause("degenerate_output", text, [f"all of {evidence.local} is so"], grade=SHOWN)
        golden = _called(evidence, "golden")
        if not golden:
            return None
        text = f"the golden's own tensor is {golden}: look at how the golden was captured first"
        return Cause(
            "degenerate_output",
            text,
            [f"the candidate's {evidence.local} is not"],
            grade=SHOWN,
        )


def _called(evidence: Evidence, side: str) -> str:
    """Return what a side's tensor is, or an empty string for one like any other."""
    constant = evidence.metric(f"{side}_constant")
    if constant is not None:
        what = f"the same number everywhere ({numeral(constant, 4)})" if constant else "all zero"
        filling = "that constant" if constant else "zeros"
        return what if side == "golden" else f"{what}: {_NEVER} as {filling}"
    for name, (what, why) in _WORDS.items():
        if evidence.metric(f"{side}_{name}"):
            return what if side == "golden" else f"{what}: {why}"
    return ""


RULE = DegenerateOutput()
