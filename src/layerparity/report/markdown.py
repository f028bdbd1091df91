"""Render the report as Markdown, for a ticket or a chat: the grounds, and a line for each layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from layerparity.record.verdict import Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report.answer import Answer
from layerparity.report.at_the_end import end_table, head_alone
from layerparity.report.cautions import warning_lines
from layerparity.report.closeup import instead_text, worst_header, worst_rows
from layerparity.report.gauge import gauge_text
from layerparity.report.headline import asked_counts, coverage_lines
from layerparity.report.measures import limits_texts, present
from layerparity.report.reasons import reason
from layerparity.report.reproduce import REMARK, reproduce, what_next
from layerparity.report.stages import fold, stages
from layerparity.report.table import BESIDE, JUDGED_BY, SHOWN, beside_cell, shown_cells
from layerparity.report.time import time_table
from layerparity.report.weights import weight_rows

_MOST_FAILURES = 20
_MOST_ELEMENTS = 8
# Letters of a command's line: with more, MLflow has no room beside it for what the run is, on a
# window of 1280.
_WIDEST = 68
_ARGUMENT = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def render_markdown(verdict: Verdict, answer: Answer | None) -> str:
    """Return the report as GitHub-flavoured Markdown, ending in a newline."""
    weights = [[what, str(count), _plain(text)] for what, count, text in weight_rows(verdict)]
    then = what_next(verdict)
    pairs = ((f"{REMARK}{purpose}", command) for purpose, command in reproduce(verdict))
    commands = [line for pair in pairs for line in pair]
    parts = [
        f"# {_plain(words.headline(verdict))}",
        f"**Where** {_plain(answer.where)}" if answer is not None else "",
        answer_markdown(answer) if answer is not None else "",
        _plain(words.because(verdict)),
        f"Whole model: {_plain(words.whole_model(verdict))}",
        f"**Next**\n\n{_shell(then)}" if then else "",
        _titled("Warnings", _list(warning_lines(verdict))),
        _titled("Runs", _runs(verdict)),
        _titled("Coverage", _coverage(verdict)),
        _titled("Weights", _table(["what", "tensors", "where and how"], weights)),
        _titled("First divergence", _divergence(verdict)),
        _titled("Worst elements", _worst(verdict)),
        _titled("By layer", _layers(verdict)),
        _titled("Logits", _logits(verdict)),
        _titled("Failing sites", _failures(verdict)),
        _titled("Where the time went", _table(*time_table(verdict))),
        _titled(f"Limits (tolerance={_plain(verdict.tolerance)})", _list(limits_texts(verdict))),
        _titled("Reproduce", _shell(commands)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answer_markdown(answer: Answer) -> str:
    """Return all of an answer but where, under a bold label for each part."""
    parts = [
        f"**Also**\n\n{_list(answer.also)}" if answer.also else "",
        f"**Cause** {_plain(answer.cause)}" if answer.cause else "",
        _list(f"or {other}" for other in answer.others),
        f"**Evidence**\n\n{_list(answer.evidence)}" if answer.evidence else "",
        f"**Next**\n\n{_shell(answer.next)}" if answer.next else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _runs(verdict: Verdict) -> str:
    sides = (verdict.golden, verdict.candidate)
    links = []
    for side in sides:
        name, url = _plain(side.name), words.followable(side.url)
        links.append(f"[{name}](<{url}>)" if url else name)
    lines = [["name", *links], ["run", *(_plain(words.run_text(side)) for side in sides)]]
    facts = zip(*(words.side_facts(side) for side in sides), strict=True)
    lines += [[left[0], _plain(left[1]), _plain(right[1])] for left, right in facts]
    return _table(["", "golden", "candidate"], [line for line in lines if any(line[1:])])


def _coverage(verdict: Verdict) -> str:
    counts = asked_counts(verdict)
    sites = " + ".join(f"{count} {name}" for name, count in counts.items())
    lines = [*words.left_out_lines(verdict), *coverage_lines(verdict)]
    total = f"{sites} = {sum(counts.values())} sites asked for."
    return f"{total}\n\n{_list(lines)}" if lines else total


def _divergence(verdict: Verdict) -> str:
    row = words.first_failure(verdict)
    if row is None:
        return ""
    text = words.divergence_text(row, verdict)
    metrics = []
    for measure in present([row]):
        against = f" (against the {measure.against})" if measure.against else ""
        metrics.append(f"{measure.label} {measure.told(row.metrics[measure.name])}{against}")
    also, fed = words.also_failing(row, verdict), words.feed_note(verdict)
    parts = [text, also, fed, reason(row), " · ".join(metrics)]
    return "\n\n".join(_plain(part) for part in parts if part)


def _worst(verdict: Verdict) -> str:
    shown = verdict.portrait
    if shown is None:
        return ""
    instead = _plain(instead_text(shown))
    if not shown.worst:
        return instead
    table = _table(worst_header(shown), worst_rows(shown)[:_MOST_ELEMENTS])
    return f"{instead} `{shown.site}`, counted from 0\n\n{table}".lstrip()


def _logits(verdict: Verdict) -> str:
    header, lines = end_table(verdict, every=False)
    table = _table([_plain(name) for name in header], lines)
    alone = head_alone(verdict)
    return f"Of {alone}.\n\n{table}" if lines and alone else table


def _layers(verdict: Verdict) -> str:
    lines = []
    for each in fold(stages(verdict)):
        shown, judged = shown_cells(each, verdict)
        outcome = f"{words.GLYPH[each.outcome]} {each.outcome.value}"
        beside = _plain(beside_cell(each, verdict))
        sites = str(sum(len(stage.rows) for stage in each.stages))
        lines.append([_plain(each.name), outcome, f"`{shown}`", _plain(judged), beside, sites])
    return _table(["layer", "outcome", SHOWN, JUDGED_BY, BESIDE, "sites"], lines)


def _failures(verdict: Verdict) -> str:
    failed = [row for row in verdict.rows if row.outcome is Outcome.FAIL]
    lines = [
        [f"`{row.site}`", _plain(gauge_text(row, verdict.limits)), _plain(reason(row))]
        for row in failed[:_MOST_FAILURES]
    ]
    rest = len(failed) - len(lines)
    table = _table(["site", JUDGED_BY, "reason"], lines)
    return f"{table}\n\nand {rest} more in the HTML report." if rest else table


def _titled(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_plain(item)}" for item in items)


def _shell(lines: Sequence[str]) -> str:
    return "\n".join(["```sh", *map(_broken, lines), "```"]) if lines else ""


def _broken(line: str) -> str:
    """Break a command where a shell reads on: MLflow's page is as wide as its longest line."""
    if line.startswith(REMARK):
        return line
    rows = [""]
    for word in _ARGUMENT.findall(line):
        if rows[-1].strip() and len(rows[-1]) + len(word) > _WIDEST:
            rows.append(" ")
        rows[-1] += f" {word}" if rows[-1] else word
    return " \\\n".join(rows)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _plain(text: str) -> str:
    """Escape what Markdown or HTML would read as markup, and keep a cell on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
