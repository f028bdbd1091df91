"""The report as Markdown, as a terminal table, and as columns for MLflow."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from report_samples import (
    CASES,
    every_case,
    every_oddity,
    html_of,
    judged,
    markdown_of,
    real,
    sample,
    side,
)
from rich.console import Console
from test_report import Page

from layerparity.anatomy.site import Kind, Site
from layerparity.record.verdict import Breach, Outcome, Row, Verdict
from layerparity.report.reasons import reason
from layerparity.report.table import closing_table, per_site_table


def printed(comparison: Verdict) -> str:
    target = io.StringIO()
    Console(file=target, width=120).print(closing_table(comparison))
    return target.getvalue()


@every_case
def test_markdown_begins_with_the_verdict_and_has_whole_tables(comparison: Verdict) -> None:
    text = markdown_of(comparison)
    assert text.startswith(f"# {comparison.outcome.value.upper()}")
    assert text.endswith("```\n")
    assert f"= {comparison.total} sites asked for." in text
    width = None
    for line in text.splitlines():
        if line.startswith("|"):
            bars = len(re.findall(r"(?<!\\)\|", line))
            assert width in (None, bars)
            width = bars
        else:
            width = None


def test_markdown_names_the_first_divergence_and_the_layers() -> None:
    text = markdown_of(CASES["fail"])
    assert text.startswith("# FAIL at layers.3.mlp:out\n")
    assert "The first site to fail is the MLP out of layer 3." in text
    assert "| layer 3 | ✕ fail | `layers.3.mlp:out` | max \\|Δ\\| 2.6 of 0.01 |  | 7 |" in text
    assert "| judged by |" in text
    command = "python run.py job=compare golden=gggg3f9a27be1d4c06a5b8c7d6e5f40312 candidate="
    assert command in text.replace(" \\\n ", "")
    assert "| layers 0–30 | ✓ pass |" in markdown_of(sample(62, "layers.31.mlp:out"))


def test_markdown_escapes_what_would_be_markup_and_keeps_cells_on_one_line() -> None:
    evil = "a|b\n<img src=x> [x](javascript:y) `c`"
    comparison = replace(
        judged([real("layers.0.mlp:out", 0.2, Outcome.FAIL, breaches=(Breach(evil, 0.2),))]),
        golden=side("golden", name=evil, url="javascript:x"),
    )
    text = markdown_of(comparison)
    assert "a\\|b \\<img src=x\\> \\[x\\](javascript:y) \\`c\\`" in text
    assert "<img" not in text.replace("\\<img", "")


def test_markdown_limits_the_list_of_failing_sites() -> None:
    text = markdown_of(sample(62, "layers.2.mlp:out", feed="chained"))
    failing = text[text.index("## Failing sites") : text.index("## Limits")]
    assert failing.count("\n| `") == 20
    assert re.search(r"and \d+ more in the HTML report", failing)


def test_closing_table_is_short_and_has_verdict_counts_and_whole_model() -> None:
    text = printed(sample(62, "layers.31.mlp:out", feed="chained"))
    assert text.startswith("FAIL at layers.31.mlp:out")
    assert len(text.splitlines()) < 30
    assert re.search(r"layer 31 .* fail .* layers\.31\.mlp:out .* max \|Δ\| 14\.8 of 0\.01", text)
    assert re.search(r"\d+ pass \+ \d+ fail = 437 sites asked for", text)
    assert "whole model: fail" in text


def test_a_failing_layer_is_told_by_its_first_failure_and_the_worst_beside_it() -> None:
    rows = [
        real("layers.0.self_attn:out", 0.02, Outcome.FAIL),
        real("layers.0.mlp:out", 0.4, Outcome.FAIL),
        real("layers.0.mlp:out@decode.1", 0.9, Outcome.FAIL),
        real("layers.1.self_attn:out", 1e-7),
        real("layers.1.mlp:out", 2e-7),
    ]
    text = printed(judged(rows))
    first = next(line for line in text.splitlines() if "layer 0" in line)
    cells = [cell.strip() for cell in first.split("│")[1:-1]]
    assert cells[:4] == ["layer 0", "fail", "layers.0.self_attn:out", "mean |Δ| 0.016 of 0.001"]
    assert "layers.0.mlp:out@decode.1" in cells[4]
    assert "judged by" in text
    assert re.search(r"layer 1 .* layers\.1\.mlp:out +│ mean \|Δ\| 1\.6e-7 of 0\.001", text)
    markdown = markdown_of(judged(rows))
    assert (
        "`layers.0.self_attn:out` | mean \\|Δ\\| 0.016 of 0.001 | layers.0.mlp:out@decode.1 mean "
        "\\|Δ\\| 0.72 |" in markdown
    )
    page = " ".join(Page(html_of(judged(rows))).words.split())
    assert "attention out worst: MLP out mean |Δ| 0.72 of 0.001 mean |Δ| 0.016 of 0.001" in page


def test_closing_table_has_a_line_for_each_layer() -> None:
    text = printed(CASES["fail"])
    assert all(f"layer {layer} " in text for layer in range(6))
    assert "layers.3:out" not in text


def test_closing_table_shows_brackets_as_they_are_and_nan_as_text() -> None:
    name = "shape [2, 64] and [bold]not[/bold] markup [/]"
    broken = (Breach(name, 0.2, 0.1),)
    text = printed(judged([real("layers.0.mlp:out", 0.2, Outcome.FAIL, breaches=broken)]))
    assert f"{name} 0.2 of 0.1" in text
    assert " NaN " in printed(every_oddity())


def test_per_site_table_has_equal_columns_and_loses_no_value() -> None:
    comparison = every_oddity()
    table = per_site_table(comparison)
    assert {len(column) for column in table.values()} == {len(comparison.rows)}
    assert list(table)[:6] == ["site", "layer", "component", "kind", "outcome", "reason"]
    assert list(table)[6] == "judged by"
    assert set(table["site"]) == {str(row.site) for row in comparison.rows}
    bad = table["site"].index("layers.0.mlp:out")
    assert table["rel_l2"][bad] == "NaN"
    assert table["max_abs_diff"][bad] == "inf"
    assert table["novel"][bad] is None
    assert table["unequal"][table["site"].index("norm:out")] == 2.0
    assert table["layer"] == [0, 0, 0, 1, 2, 4, 4, None]


def test_per_site_table_of_nothing_has_its_columns() -> None:
    assert per_site_table(judged([]))["site"] == []


def test_an_exact_site_that_passes_has_no_reason() -> None:
    site = Site.parse("embed_tokens:in")
    assert reason(Row(site, Kind.EXACT, Outcome.PASS)) == ""
