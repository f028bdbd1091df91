"""Say what a bisection found and how, in words and as Markdown for a ticket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.ground.numeral import numeral
from layerparity.judge.growth import ChainJudgement
from layerparity.record.guilt import Cause
from layerparity.report.answer import Answer, cause_line, distinct, tensors_text
from layerparity.report.markdown import answer_markdown
from layerparity.report.reasons import reason


@dataclass(frozen=True)
class Step:
    """One thing a strategy asked and what it was told; wrong, right, or not ``judged`` at all."""

    asked: str
    told: str
    wrong: bool
    judged: bool = True


def chain_text(judged: ChainJudgement) -> str:
    """Return how a chained run ended, in a few words."""
    if judged.findings:
        return f"weights of layers.{judged.layer} differ: {tensors_text(judged.findings)}"
    if judged.failed is not None:
        return f"{judged.failed.site} fails: {reason(judged.failed)}"
    if judged.site is None:
        return "nothing to judge"
    how = "more" if judged.wrong else "no more"
    allowed = numeral(judged.allowed, 2)
    return f"{judged.site} is off by {numeral(judged.error, 2)}, {how} than rounding's {allowed}"


def chain_doubt(judged: ChainJudgement) -> str:
    """Return what a chain that is not wrong leaves open, in a sentence; empty for nothing."""
    if not judged.untold:
        return ""
    first, row = judged.untold[0], judged.untold[0].row
    more = f" and {len(judged.untold) - 1} more" if len(judged.untold) > 1 else ""
    why = f" ({reason(row)})" if row is not None and reason(row) else ""
    if row is None:
        cause = "nothing that it adds to the residual stream was compared"
    elif first.allowed:
        cause = (
            f"rounding alone may have grown to {numeral(first.allowed, 2)} of {row.site}, and a "
            f"mistake could hide in that{why}"
        )
    else:
        cause = f"{row.site} was not judged{why}" if why else f"{row.site} is missing"
    return f"the chained run cannot tell about layers.{first.layer}{more}: {cause}"


def markdown(answer: Answer, steps: Sequence[Step], causes: Sequence[Cause]) -> str:
    """Return a bisection as Markdown: the answer, how it was found, all causes."""
    parts = [f"# {answer.where}", answer_markdown(answer), "## How it was found"]
    parts.append("\n".join(f"{n}. {s.asked}: {s.told}" for n, s in enumerate(steps, 1)))
    if causes:
        parts.append("## Causes, the likeliest first")
        parts.append("\n".join(cause_line(cause) for cause in distinct(causes)))
    return "\n\n".join(part for part in parts if part) + "\n"
