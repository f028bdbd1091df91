"""Make tables of a comparison: a short one for the terminal, and one row per site for MLflow."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report import headline as words
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import coverage_lines
from layerparity.report.measures import REL_L2, numeral, present
from layerparity.report.reasons import reason
from layerparity.report.stages import fold, forward_order, stages
from layerparity.report.weights import weight_lines

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = "first to fail, else worst"
BESIDE = "worst beside it"
_REASONS = 3
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
    # What it is relative to stands beside a multiple of the floor, which is against the reference.
    table.add_column(f"{REL_L2.label} (golden)", justify="right", min_width=6)
    found = fold(stages(verdict.rows))
    if any(each.beside for each in found):
        table.add_column(BESIDE, overflow="fold")
    table.add_column("reason", overflow="fold")
    for each in found:
        row, outcome = each.shown, Text(each.outcome.value, style=_STYLE[each.outcome])
        # Text, not str: rich would read "[...]" in a reason as its own markup.
        layer = Text(each.name.replace("–", "-"))
        cells: list[Any] = [layer, outcome, Text(str(row.site)), _rel_l2(row)]
        if len(table.columns) > len(cells) + 1:
            worse = each.beside
            cells.append(Text(f"{worse.site} {_rel_l2(worse)}" if worse is not None else ""))
        table.add_row(*cells, Text(reason(row)))
    return table


def per_site_table(verdict: Verdict) -> dict[str, list[Any]]:
    """Return one row per site in forward order, as columns of equal length.

    Columns: site, layer (None outside the blocks), component, kind, outcome, reason, then every
    metric that some row has. A metric is a float, None where the row has no such metric, and the
    text ``NaN``, ``inf`` or ``-inf`` where it is not finite, because JSON would drop it.
    """
    rows = forward_order(verdict.rows)
    columns: dict[str, list[Any]] = {
        "site": [str(row.site) for row in rows],
        "layer": [row.site.layer for row in rows],
        "component": [row.site.local for row in rows],
        "kind": [row.kind.value for row in rows],
        "outcome": [row.outcome.value for row in rows],
        "reason": [reason(row) for row in rows],
    }
    for measure in present(rows):
        columns[measure.name] = [_storable(row.metrics.get(measure.name)) for row in rows]
    return columns


def _caption(verdict: Verdict) -> str:
    counts = " + ".join(f"{n} {name}" for name, n in verdict.counts.items() if n)
    lines = [f"{counts or 'nothing'} = {verdict.total} sites asked for"]
    skipped = Counter(reason(r) for r in verdict.rows if r.outcome is Outcome.SKIPPED)
    lines += [f"skipped: {n} {why}" for why, n in skipped.most_common(_REASONS)]
    lines.append(f"whole model: {words.whole_model(verdict)}")
    lines += [*weight_lines(verdict), *coverage_lines(verdict)]
    lines += [f"warning: {each}" for each in warning_lines(verdict)]
    return "\n".join(lines)


def _rel_l2(row: Row) -> str:
    value = row.metrics.get(REL_L2.name)
    if value is None:
        return "-"
    if math.isinf(value):
        return "golden is 0"
    return numeral(value) if math.isfinite(value) else "NaN"


def _storable(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else str(value)
