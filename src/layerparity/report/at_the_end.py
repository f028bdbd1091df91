"""Say how far the logits are apart, in the numbers that reviewers quote: a line, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from layerparity.anatomy.site import PREFILL
from layerparity.ground.numeral import numeral
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.measure import Measure
from layerparity.report.measures import AT_THE_END, BY_NAME

_RATIO = "_ratio"
NUMBERS = tuple(each for each in AT_THE_END if f"{each.name}{_RATIO}" in BY_NAME)
_RATIOS = tuple(BY_NAME[f"{each.name}{_RATIO}"] for each in NUMBERS)
OVER = "over clean ways"
_LINE = ("kl_mean", "kl_max", "top1_agreement", "logp_mean", "perplexity_ratio")


def end_rows(verdict: Verdict) -> list[Row]:
    """Return the rows of the logits that have numbers, in the order of the passes."""
    found = [row for row in verdict.rows if row.site.is_logits and "kl_mean" in row.metrics]
    return sorted(found, key=lambda row: row.site.pass_order())


def end_lines(verdict: Verdict) -> list[str]:
    """Return the numbers of the prefill's logits, and the worst of the decode steps, as lines.

    Of a head that is judged by itself they say nothing about what fails elsewhere: then none.
    """
    rows, alone = end_rows(verdict), head_alone(verdict)
    if alone and verdict.outcome is Outcome.FAIL and all(r.outcome is Outcome.PASS for r in rows):
        return []
    steps = [row for row in rows if row.site.phase != PREFILL]
    found = [_line(f"the {PREFILL}", [row], alone) for row in rows if row.site.phase == PREFILL]
    return found + ([_line(f"the {_worst_of(steps)}", steps, alone)] if steps else [])


def head_alone(verdict: Verdict) -> str:
    """Return what to call a head that is judged by itself; empty where blocks before it fed it."""
    return "lm_head alone, fed the same on both sides" if verdict.feed == "isolated" else ""


def _line(name: str, rows: list[Row], alone: str) -> str:
    worst = {name: _worst(rows, BY_NAME[name]) for name in _LINE}
    text = ", ".join(
        f"{BY_NAME[name].label} {BY_NAME[name].told(value)}"
        for name, value in worst.items()
        if value is not None
    )
    ratios = [row.metrics[name] for row in rows for name in _ratio_names(row)]
    largest = max(ratios, default=0.0)
    beside = f"; at most {numeral(largest)} times what clean variants show" if largest else ""
    of = f"{alone}, in {name}" if alone else name
    return f"logits of {of}: {text}{beside}"


def end_table(verdict: Verdict, *, every: bool) -> tuple[list[str], list[list[str]]]:
    """Return a header and lines: the prefill, the same over clean ways, and the decode steps.

    With ``every`` the steps have a line each, without it one of the worst of all.
    """
    rows = end_rows(verdict)
    header = ["", *(each.label for each in NUMBERS)]
    lines = []
    steps = [row for row in rows if row.site.phase != PREFILL]
    for row in rows if every else [row for row in rows if row.site.phase == PREFILL]:
        lines.append([_name(row), *_cells(row.metrics)])
        if _ratio_names(row):
            lines.append([OVER, *_cells(row.metrics, _RATIOS)])
    if steps and not every:
        worst = {each.name: _worst(steps, each) for each in NUMBERS}
        lines.append([_worst_of(steps), *_cells(worst)])
    return header, lines


def end_metrics(verdict: Verdict) -> Iterator[tuple[str, float, int]]:
    """Yield the numbers as points: name, value, and the pass: 0 the prefill, then decode steps."""
    for row in end_rows(verdict):
        step = 0 if row.site.phase == PREFILL else row.site.step
        for each in NUMBERS:
            if each.name in row.metrics:
                yield f"logits/{each.name}", row.metrics[each.name], step


def _worst_of(steps: list[Row]) -> str:
    return f"worst of {len(steps)} decode step{'s' * (len(steps) != 1)}"


def _name(row: Row) -> str:
    return PREFILL if row.site.phase == PREFILL else f"{row.site.phase} {row.site.step}"


def _ratio_names(row: Row) -> list[str]:
    return [each.name for each in _RATIOS if each.name in row.metrics]


def _cells(
    values: Mapping[str, float | None], measures: tuple[Measure, ...] = NUMBERS
) -> list[str]:
    found = [(each, values.get(each.name)) for each in measures]
    return ["" if value is None else each.show(value) for each, value in found]


def _worst(rows: list[Row], measure: Measure) -> float | None:
    values = [row.metrics[measure.name] for row in rows if measure.name in row.metrics]
    return max(values, key=measure.badness, default=None)
