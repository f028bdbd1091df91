"""Make tables of a comparison: a short one for the terminal, and one row per site for MLflow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from layerparity.record.verdict import Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report.at_the_end import end_lines
from layerparity.report.cautions import warning_lines
from layerparity.report.gauge import gauge, gauge_text
from layerparity.report.headline import coverage_lines
from layerparity.report.measures import present
from layerparity.report.reasons import reason
from layerparity.report.stages import Fold, fold, forward_order, stages
from layerparity.report.weights import finding_text, weight_lines

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = "first to fail, else worst"
BESIDE = "worst beside it"
JUDGED_BY = "judged by"
# Broken limits of a site that are said: a line of a terminal is narrow.
_SAID = 1
_STYLE = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.MISSING: "magenta",
    Outcome.SKIPPED: "dim",
}


def closing_table(verdict: Verdict) -> Table:
    """Return what a compare job ends with: the verdict above, a line per layer, counts below.

    Neighbouring layers that end alike share a line where there are many. Only ASCII is used for
    what must be read, so that it survives a log file.
    """
    from rich.table import Table
    from rich.text import Text

    style = _STYLE[verdict.outcome]
    table = Table(
        title=Text(words.headline(verdict), style=style),
        caption=Text(_caption(verdict)),
        title_justify="left",
        caption_justify="left",
    )
    failing = verdict.outcome is Outcome.FAIL
    for name in ("layer", "outcome", SHOWN if failing else "worst site"):
        table.add_column(name, overflow="fold")
    table.add_column(JUDGED_BY, no_wrap=True)
    found = fold(stages(verdict))
    if any(each.beside for each in found):
        table.add_column(BESIDE, overflow="fold")
    table.add_column("reason", overflow="fold")
    for each in found:
        # Text, not str: rich would read "[...]" in a reason as its own markup.
        cells: list[Any] = [Text(each.name.replace("–", "-"))]
        cells.append(Text(each.outcome.value, style=_STYLE[each.outcome]))
        cells += [Text(cell) for cell in shown_cells(each, verdict)]
        if len(table.columns) > len(cells) + 1:
            cells.append(Text(beside_cell(each, verdict)))
        table.add_row(*cells, Text(why_text(each)))
    return table


def shown_cells(each: Fold, verdict: Verdict) -> tuple[str, str]:
    """Return what stands for some layers, and what it is judged by: a site, or a weight."""
    weight = each.weight
    if weight is not None:
        return f"{weight.module} (weights)", "-"
    return str(each.shown.site), gauge_text(each.shown, verdict.limits)


def beside_cell(each: Fold, verdict: Verdict) -> str:
    """Return the worst row of some layers beside the shown one; empty where there is none."""
    row = each.beside
    found = gauge(row, verdict.limits) if row is not None else None
    value = f" {found.value_text}" if found is not None else ""
    return "" if row is None else f"{row.site}{value}"


def why_text(each: Fold) -> str:
    """Return why some layers end as they do: the reason of what is shown of them."""
    return reason(each.shown, _SAID) if each.weight is None else finding_text(each.weight)


def per_site_table(verdict: Verdict) -> dict[str, list[Any]]:
    """Return one row per site in forward order, as columns of equal length.

    Columns: site, layer (None outside the blocks), component, kind, outcome, reason, what it is
    judged by, then every metric that some row has. A metric is a float, None where the row has no
    such metric, and the text ``NaN``, ``inf`` or ``-inf`` where it is not finite, because JSON
    would drop it.
    """
    rows = forward_order(verdict.rows)
    columns: dict[str, list[Any]] = {
        "site": [str(row.site) for row in rows],
        "layer": [row.site.layer for row in rows],
        "component": [row.site.local for row in rows],
        "kind": [row.kind.value for row in rows],
        "outcome": [row.outcome.value for row in rows],
        "reason": [reason(row) for row in rows],
        JUDGED_BY: [gauge_text(row, verdict.limits) for row in rows],
    }
    for measure in present(rows):
        columns[measure.name] = [_storable(row.metrics.get(measure.name)) for row in rows]
    return columns


def _caption(verdict: Verdict) -> str:
    lines = [words.counts_text(verdict), *words.left_out_lines(verdict)]
    lines.append(f"whole model: {words.whole_model(verdict)}")
    lines += [*weight_lines(verdict), *coverage_lines(verdict)]
    lines += end_lines(verdict)
    lines += [f"warning: {each}" for each in warning_lines(verdict)]
    return "\n".join(lines)


def _storable(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else str(value)
