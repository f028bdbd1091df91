"""Sentence: what is wrong, put in words line by line; and a bisection as Markdown for a ticket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerparity.judge.descend import amplified, seen_in
from layerparity.judge.guilt import Guilt, names_of
from layerparity.mistakes.cause import Cause
from layerparity.record.comparison import Answer
from layerparity.record.verdict import Row
from layerparity.report.markdown import answer_markdown


@dataclass(frozen=True)
class Step:
    """One thing a strategy asked and what it was told."""

    asked: str
    told: str
    wrong: bool


# Each number with what it is measured against: the two are not the same tensor.
_NUMBERS = (
    ("error_ratio", "error against the reference {:.3g} times the floor of rounding"),
    ("rel_l2", "relative L2 error against the golden {:.2g}"),
    ("norm_ratio", "norm {:.4g} times the golden's"),
    ("set_agreement", "expert sets are the golden's at {:.0%} of the tokens"),
)
_SURE = ((0.9, "very likely"), (0.7, "likely"), (0.4, "plausible"), (0.0, "a guess"))
_OTHERS = 3


def how_sure(confidence: float) -> str:
    """Return a rule's confidence (0 to 1) in words, the share beside them: ``likely (75%)``."""
    word = next(word for least, word in _SURE if confidence >= least)
    return f"{word} ({confidence:.0%})"


def answer_of(
    guilt: Guilt,
    causes: Sequence[Cause],
    rows: Mapping[str, Row],
    commands: Sequence[str] = (),
    last: bool = False,
) -> Answer:
    """Return where it is wrong, why, what speaks for it and what to type next.

    ``rows`` are those of the guilty place in the guilty phase, by address in the block. ``last``
    says that the strategy looked for the last wrong block.
    """
    which = "last wrong block's first" if last else "first"
    first, *rest = [f"{how_sure(each.confidence)}: {each.sentence}" for each in causes] or [""]
    reasons = causes[0].reasons if causes else ()
    return Answer(
        where=f"{guilt.called} is the {which} wrong place",
        cause=first or "no known cause fits",
        others=tuple(rest[:_OTHERS]),
        evidence=tuple(dict.fromkeys((*_evidence(guilt), *_leaps(guilt, rows), *reasons))),
        next=tuple(commands),
    )


def _evidence(guilt: Guilt) -> Iterator[str]:
    """Yield what was seen there: good inputs, the failing site, its numbers, its weights."""
    if guilt.good:
        many = "pass" if len(guilt.good) > 1 else "passes"
        yield f"{', '.join(str(site) for site in guilt.good)} {many}"
    if guilt.row is not None:
        numbers = numbers_text(guilt.row)
        yield f"{guilt.site} fails" + (f": {numbers}" if numbers else "")
    if guilt.findings:
        yield f"weights differ: {names_of(guilt.findings)}"
    if guilt.also:
        yield f"wrong on good inputs as well: {', '.join(guilt.also)}"
    yield from guilt.notes


def _leaps(guilt: Guilt, rows: Mapping[str, Row]) -> Iterator[str]:
    named = {f"{guilt.component} ({guilt.part})" if guilt.part else guilt.component, *guilt.also}
    for component, leap in amplified(rows, seen_in(rows)).items():
        if component not in named:
            yield (
                f"{component} seems wrong as well: its output's error is {leap:.2g} times that of "
                "what it is fed"
            )


def numbers_text(row: Row) -> str:
    """Return the few numbers of a row that a person asks for first."""
    known = {name: row.metrics[name] for name, _ in _NUMBERS if name in row.metrics}
    found = [form.format(known[n]) for n, form in _NUMBERS if math.isfinite(known.get(n, math.nan))]
    if known.get("rel_l2") == math.inf:
        found.append("the golden is zero there, so no error relative to it")
    elif math.isnan(known.get("rel_l2", 0.0)):
        found.append("no pair of finite numbers")
    return ", ".join(found)


def markdown(answer: Answer, steps: Sequence[Step], causes: Sequence[Cause]) -> str:
    """Return a bisection as Markdown: the answer, how it was found, all causes."""
    parts = [f"# {answer.where}", answer_markdown(answer), "## How it was found"]
    parts.append("\n".join(f"{n}. {s.asked}: {s.told}" for n, s in enumerate(steps, 1)))
    if causes:
        parts.append("## Causes, the likeliest first")
        parts.append("\n".join(_cause_line(cause) for cause in causes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _cause_line(cause: Cause) -> str:
    reasons = f" ({'; '.join(cause.reasons)})" if cause.reasons else ""
    return f"- {how_sure(cause.confidence)} `{cause.id}`: {cause.sentence}{reasons}"
