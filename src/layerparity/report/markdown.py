"""The report as Markdown, for a ticket or a chat: the verdict, its grounds, one line per layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from layerparity.record.comparison import Answer, Comparison, Side
from layerparity.record.verdict import Outcome, Row
from layerparity.report import headline as words
from layerparity.report.distributions import worst_header, worst_rows
from layerparity.report.headline import coverage_lines, weight_rows
from layerparity.report.measures import REL_L2, Measure, limit_text, present
from layerparity.report.reproduce import reproduce
from layerparity.report.stages import Fold, fold, stages
from layerparity.report.table import BESIDE, SHOWN
from layerparity.report.time import time_table

_MOST_FAILURES = 20
_MOST_ELEMENTS = 8
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def render_markdown(comparison: Comparison) -> str:
    """Return the report as GitHub-flavoured Markdown, ending in a newline."""
    parts = [
        f"# {_plain(words.headline(comparison))}",
        _answer(comparison),
        _plain(words.because(comparison)),
        f"Whole model: {_plain(words.whole_model(comparison))}",
        _titled("Warnings", _list(comparison.warnings)),
        _titled("Runs", _runs(comparison)),
        _titled("Coverage", _coverage(comparison)),
        _titled("Weights", _weights(comparison)),
        _titled("First divergence", _divergence(comparison)),
        _titled("Worst elements", _worst(comparison)),
        _titled("By layer", _layers(comparison)),
        _titled("Failing sites", _failures(comparison)),
        _titled("Where the time went", _time(comparison)),
        _titled(f"Limits (tolerance={_plain(comparison.tolerance)})", _limits(comparison)),
        _titled("Reproduce", _commands(comparison)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answer_markdown(answer: Answer) -> str:
    """Return all of an answer but where, under a bold label for each part."""
    parts = [
        f"**Cause** {_plain(answer.cause)}" if answer.cause else "",
        _list(f"or {other}" for other in answer.others),
        f"**Evidence**\n\n{_list(answer.evidence)}" if answer.evidence else "",
        "\n".join(["**Next**\n", "```sh", *answer.next, "```"]) if answer.next else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _answer(comparison: Comparison) -> str:
    answer = comparison.answer
    if answer is None:
        return ""
    return f"**Where** {_plain(answer.where)}\n\n{answer_markdown(answer)}".rstrip()


def _runs(comparison: Comparison) -> str:
    names = ("model", "backend", "device", "dtype", "port", "scope", "feed")
    sides = (comparison.golden, comparison.candidate)
    lines = [["name", *(_linked(side) for side in sides)]]
    lines += [["run", *(_plain(words.run_text(side)) for side in sides)]]
    lines += [[name, *(_plain(getattr(side, name)) for side in sides)] for name in names]
    return _table(["", "golden", "candidate"], (line for line in lines if any(line[1:])))


def _coverage(comparison: Comparison) -> str:
    verdict = comparison.verdict
    counts = [f"{count} {name}" for name, count in verdict.counts.items()]
    sites = f"{' + '.join(counts)} = {verdict.total} sites asked for."
    lines = coverage_lines(comparison)
    return f"{sites}\n\n{_list(lines)}" if lines else sites


def _weights(comparison: Comparison) -> str:
    lines = [[what, str(count), _plain(text)] for what, count, text in weight_rows(comparison)]
    return _table(["what", "tensors", "where and how"], lines) if lines else ""


def _divergence(comparison: Comparison) -> str:
    row = words.first_failure(comparison)
    if row is None:
        return ""
    text = words.divergence_text(row, words.stage_of(row, comparison))
    metrics = [_metric(measure, row) for measure in present([row])]
    parts = [text, words.feed_note(comparison), row.reason, " · ".join(metrics)]
    return "\n\n".join(_plain(part) for part in parts if part)


def _metric(measure: Measure, row: Row) -> str:
    against = f" (against the {measure.against})" if measure.against else ""
    return f"{measure.label} {measure.show(row.metrics[measure.name])}{against}"


def _worst(comparison: Comparison) -> str:
    shown = comparison.portrait
    if shown is None or not (shown.worst or shown.note):
        return ""
    note = _plain(shown.note)
    if not shown.worst:
        return note
    table = _table(worst_header(shown), worst_rows(shown)[:_MOST_ELEMENTS])
    return f"{note} `{shown.site}`, counted from 0\n\n{table}".lstrip()


def _layers(comparison: Comparison) -> str:
    folds = fold(stages(comparison.rows))
    against = f"{REL_L2.label} to the golden"
    header = ["layer", "outcome", SHOWN, against, BESIDE, "sites"]
    return _table(header, (_layer(each) for each in folds)) if folds else ""


def _layer(each: Fold) -> list[str]:
    count = sum(len(stage.rows) for stage in each.stages)
    return [
        _plain(each.name),
        _outcome(each.outcome),
        f"`{each.shown.site}`",
        _rel_l2(each.shown),
        f"`{each.beside.site}` {_rel_l2(each.beside)}" if each.beside else "",
        str(count),
    ]


def _failures(comparison: Comparison) -> str:
    failed = [row for row in comparison.rows if row.outcome is Outcome.FAIL]
    failed.sort(key=lambda row: row.site)
    lines = [[f"`{r.site}`", _rel_l2(r), _plain(r.reason)] for r in failed[:_MOST_FAILURES]]
    if not lines:
        return ""
    rest = len(failed) - len(lines)
    table = _table(["site", f"{REL_L2.label} to the golden", "reason"], lines)
    return f"{table}\n\nand {rest} more in the HTML report." if rest else table


def _time(comparison: Comparison) -> str:
    header, lines = time_table(comparison)
    return _table(header, lines) if lines else ""


def _limits(comparison: Comparison) -> str:
    return _list(limit_text(name, limit) for name, limit in comparison.limits.items())


def _commands(comparison: Comparison) -> str:
    lines = [f"{command}  # {purpose}" for purpose, command in reproduce(comparison)]
    return "\n".join(["```sh", *lines, "```"]) if lines else ""


def _rel_l2(row: Row) -> str:
    value = row.metrics.get(REL_L2.name)
    return "–" if value is None else REL_L2.show(value)


def _outcome(outcome: Outcome) -> str:
    return f"{words.GLYPH[outcome]} {outcome.value}"


def _linked(side: Side) -> str:
    name, url = _plain(side.name), words.followable(side.url)
    return f"[{name}](<{url}>)" if url else name


def _titled(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_plain(item)}" for item in items)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _plain(text: str) -> str:
    """Escape what Markdown or HTML would read as markup, and keep a cell on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
