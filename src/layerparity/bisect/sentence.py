"""Sentence: what a bisection found, said in one breath, and as Markdown for a ticket."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.bisect.guilt import Guilt, names_of
from layerparity.bisect.strategies.base import Step
from layerparity.causes.base import Cause
from layerparity.verdict import Row

_SHOWN = (
    ("error_ratio", "{:.3g} times the floor of rounding"),
    ("rel_l2", "relative error {:.2g}"),
    ("set_agreement", "expert sets agree at {:.0%} of the tokens"),
    ("norm_ratio", "norm ratio {:.4g}"),
)


def sentence(guilt: Guilt, causes: Sequence[Cause], last: bool = False) -> str:
    """Return ``layers.3.self_attn.q_norm is the first wrong place: ... Likeliest cause: ...``.

    ``last`` says that the strategy looked for the last wrong block.
    """
    which = "last wrong block's first" if last else "first"
    said = f"{guilt.called} is the {which} wrong place: {evidence_text(guilt)}."
    if guilt.also:
        said += f" Wrong on good inputs as well: {', '.join(guilt.also)}."
    for note in guilt.notes:
        said += f" {note[0].upper()}{note[1:]}."
    if not causes:
        return f"{said} No known cause fits."
    first = causes[0]
    because = f" because {'; '.join(first.reasons)}" if first.reasons else ""
    return f"{said} Likeliest cause ({first.confidence:.0%}): {first.sentence}{because}."


def evidence_text(guilt: Guilt) -> str:
    """Return what was seen there: good inputs, the failing site, its numbers, its weights."""
    parts = []
    if guilt.good:
        many = "pass" if len(guilt.good) > 1 else "passes"
        parts.append(f"{', '.join(str(site) for site in guilt.good)} {many}")
    if guilt.row is not None:
        numbers = numbers_text(guilt.row)
        parts.append(f"{guilt.site} fails" + (f" ({numbers})" if numbers else ""))
    if guilt.findings:
        parts.append(f"weights differ: {names_of(guilt.findings)}")
    return ", ".join(parts)


def numbers_text(row: Row) -> str:
    """Return the few numbers of a row that a person asks for first."""
    return ", ".join(form.format(row.metrics[name]) for name, form in _SHOWN if name in row.metrics)


def markdown(
    said: str, steps: Sequence[Step], causes: Sequence[Cause], commands: Sequence[str]
) -> str:
    """Return a bisection as Markdown: the sentence, how it was found, causes, commands."""
    parts = [f"# {said.partition(': ')[0]}", said, "## How it was found"]
    parts.append("\n".join(f"{n}. {s.asked}: {s.told}" for n, s in enumerate(steps, 1)))
    if causes:
        parts.append("## Causes, the likeliest first")
        parts.append("\n".join(_cause_line(cause) for cause in causes))
    if commands:
        parts += ["## Reproduce", "```bash\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(parts) + "\n"


def _cause_line(cause: Cause) -> str:
    reasons = f" ({'; '.join(cause.reasons)})" if cause.reasons else ""
    return f"- {cause.confidence:.0%} `{cause.id}`: {cause.sentence}{reasons}"
