"""Render the report as one HTML page that needs no script, no font and no address beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from layerparity.anatomy.block import label
from layerparity.anatomy.site import Site
from layerparity.ground.numeral import numeral
from layerparity.record.portrait import FLOOR, Portrait
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report.answer import Answer
from layerparity.report.at_the_end import end_table, head_alone
from layerparity.report.cautions import warning_lines
from layerparity.report.closeup import instead_text, worst_header, worst_rows
from layerparity.report.columns import Columns
from layerparity.report.distributions import quantile_plot, ulp_histogram
from layerparity.report.error_by_layer import error_by_layer
from layerparity.report.expert_load import experts_per_row, load_panels, load_text
from layerparity.report.experts import agreement_by_layer, agreement_text, load_figure, load_site
from layerparity.report.gauge import Ordinate, gauge_meaning, gauge_text, nearest_to_limit
from layerparity.report.headline import asked_counts, coverage_lines
from layerparity.report.heatmaps import (
    GROUPS,
    binning,
    group_heatmap,
    metric_heatmap,
    per_row,
    token_heatmap,
)
from layerparity.report.measure import Measure
from layerparity.report.measures import beyond, cells_of, compared, limits_texts, present, which
from layerparity.report.noise_by_layer import accumulated_error, local_error
from layerparity.report.reasons import reason
from layerparity.report.reproduce import reproduce, what_next
from layerparity.report.stages import beside, first_wrong, fold, stages, table_rows
from layerparity.report.svg import stylesheet
from layerparity.report.time import where_time_went
from layerparity.report.weights import finding_text, weight_rows

_TEMPLATE = "report.html.j2"
_BLOCK_OUT = ":out"
# After a dot of a name, and not of a number.
_DOT = re.compile(r"(?<=\.)(?=[A-Za-z_])|(?<=[A-Za-z_]\.)(?=\w)")


@dataclass(frozen=True)
class TokenMap:
    """A token x layer figure: the site it shows, its markup, the tokens in one of its rows."""

    local: str
    figure: str
    per_row: int


def render_html(verdict: Verdict, answer: Answer | None) -> str:
    """Return the whole report as HTML text (UTF-8), readable from a file, a mail or an iframe."""
    return _compiled().render(_context(verdict, answer))


@cache
def _compiled() -> Template:
    """Return the report's template; a bisection renders a report for each comparison."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(link=words.followable, called=label, numeral=numeral)
    environment.filters.update(dotted=dotted, breakable=breakable)
    return environment.get_template(_TEMPLATE)


def dotted(name: str) -> Markup:
    """Return a name as markup that a narrow page breaks after a dot, not within a word."""
    return Markup("<wbr>").join(_DOT.split(name))


def breakable(name: str) -> Markup:
    """Return a name as markup that a narrow column breaks after an underscore, if it must."""
    return Markup("<wbr>").join(re.split(r"(?<=_)", name))


def names_css(measures: Sequence[Measure]) -> str:
    """Return the CSS that names each number of a site on paper, where no header stands over it."""
    said = (
        # Of what is no letter, its number in hexadecimal: CSS and HTML read nothing else into it.
        (n, re.sub(r"\W", lambda found: f"\\{ord(found[0]):x} ", each.label))
        for n, each in enumerate(measures, start=2)
    )
    rules = (f'.sites td:nth-child({n + 1})::before{{content:"{name} "}}' for n, name in said)
    return f"@media print{{{''.join(rules)}}}"


def _context(verdict: Verdict, answer: Answer | None) -> dict[str, Any]:
    found = stages(verdict)
    first = first_wrong(found)
    columns = Columns(found)
    measures = compared(verdict.rows)
    return {
        "verdict": verdict,
        "answer": answer,
        "model": verdict.candidate.model or verdict.golden.model,
        "reason": reason,
        "words": words,
        "commands": reproduce(verdict),
        "then": what_next(verdict),
        "warnings": warning_lines(verdict),
        "evidence": {
            "weights": weight_rows(verdict),
            "coverage": [*words.left_out_lines(verdict), *coverage_lines(verdict)],
        },
        "glyph": {outcome.value: glyph for outcome, glyph in words.GLYPH.items()},
        "heat_css": stylesheet(),
        "sides": _sides(verdict),
        "focus": _focus(verdict),
        "ends": end_table(verdict, every=True),
        "head_alone": head_alone(verdict),
        "noise": noise(columns, verdict, _worst_component(verdict)),
        "portrait": portrait(columns, verdict),
        "experts": experts(columns, verdict),
        "folds": fold(found),
        # The one stage whose table stands open.
        "opened": "" if first is None else first.key,
        "measures": measures,
        "names_css": names_css(measures),
        "cells": lambda row: cells_of(row, measures),
        "gauge": lambda row: gauge_text(row, verdict.limits),
        "gauge_meaning": lambda row: gauge_meaning(row, verdict.limits),
        "finding_text": finding_text,
        "asked": asked_counts(verdict),
        "which": which,
        "table_rows": table_rows,
        "figures": [each for each in figures(columns, verdict) if each.markup],
        "token_maps": _token_maps(columns, verdict),
        "time": where_time_went(verdict),
        "limits": limits_texts(verdict),
        "beyond": beyond,
        "glossary": [m for m in present(verdict.rows) if m.meaning],
    }


@dataclass(frozen=True)
class Figure:
    """A figure with a section of its own: its anchor, its name in the navigation, title and words.

    A figure without ``markup`` is left out.
    """

    key: str
    name: str
    title: str
    text: str
    markup: str


_FED = {
    "chained": " The blocks are chained: errors carry forward.",
    "isolated": " The blocks are isolated: each point is one block's own error.",
}


def figures(columns: Columns, verdict: Verdict) -> list[Figure]:
    """Return the figures over all layers, in the order of the page."""
    shown = Ordinate.of(verdict)
    return [
        Figure(
            "error",
            "Error by layer",
            shown.title,
            shown.words + _FED.get(verdict.feed, ""),
            error_by_layer(columns, verdict),
        ),
        Figure(
            "metrics",
            "Metrics",
            "Layer × metric",
            "The worst value of each metric among the sites of a layer. Every line has its own "
            "scale: pale up to its limit, or to the largest value at a site that "
            "passes. Its worst value stands at the right.",
            metric_heatmap(columns, verdict.limits),
        ),
    ]


def _sides(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return (what, golden's, candidate's) for all that either side has beside its run."""
    golden, candidate = words.side_facts(verdict.golden), words.side_facts(verdict.candidate)
    pairs = zip(golden, candidate, strict=True)
    return [(name, left, right) for (name, left), (_, right) in pairs if left or right]


def _focus(verdict: Verdict) -> dict[str, Any] | None:
    """Return what the first section shows: the first wrong site, else the nearest to its limit."""
    row = words.first_failure(verdict)
    failed = row is not None
    row = row or words.nearest(verdict)
    if row is None:
        return None
    stage = words.stage_of(row, verdict)
    text = words.divergence_text(row, verdict) if failed else words.nearest_text(row, verdict)
    return {
        "row": row,
        "stage": stage,
        "path": beside(row, stage),
        "failed": failed,
        "text": text,
        "also": words.also_failing(row, verdict) if failed else "",
        "measures": present([row]),
    }


def _token_maps(columns: Columns, verdict: Verdict) -> list[TokenMap]:
    """Return the map of the blocks' output and one of the component that ended worst."""
    maps, texts = [], verdict.coverage.texts
    noun = "stored token" if texts is not None and texts.stored else "token"
    for local in dict.fromkeys((_BLOCK_OUT, _worst_component(verdict))):
        figure = token_heatmap(columns, verdict.token_errors, local, noun) if local else ""
        if figure:
            per_row = binning(columns, verdict.token_errors, local)
            maps.append(TokenMap(local, figure, per_row))
    return maps


def _worst_component(verdict: Verdict) -> str:
    """Return the class of site in the blocks that fails first, else that nearest to its limit."""
    inside = [
        row
        for row in verdict.rows
        if str(row.site) in verdict.token_errors
        and row.site.layer is not None
        and row.site.local != _BLOCK_OUT
    ]
    failed = [row for row in inside if row.outcome is Outcome.FAIL]
    chosen = failed[0] if failed else nearest_to_limit(inside, verdict.limits)
    return chosen.site.local if chosen else ""


@dataclass(frozen=True)
class GroupMap:
    """A group x layer figure, and how many groups one of its rows holds."""

    group: str
    figure: str
    per_row: int


def noise(columns: Columns, verdict: Verdict, fallback: str) -> dict[str, Any]:
    """Return the two figures of error against rounding; ``fallback`` is a site where none is known.

    The first is about the class of site that the portrait shows.
    """
    shown = verdict.portrait
    site = Site.parse(shown.site) if shown and shown.ulp else None
    local = site.local if site and site.layer is not None else fallback
    return {
        "local_site": local,
        "local": local_error(columns, verdict, local) if local else "",
        "accumulated": accumulated_error(columns, verdict, local),
    }


def portrait(columns: Columns, verdict: Verdict) -> dict[str, Any] | None:
    """Return what the page shows of the portrait, or None where there is none."""
    shown = verdict.portrait
    if shown is None:
        return None
    maps = [
        GroupMap(group, figure, per_row(shown, group))
        for group in GROUPS
        if (figure := group_heatmap(columns, shown, group, verdict.limits))
    ]
    return {
        "site": shown.site,
        "title": _title(verdict, shown),
        "instead": instead_text(shown),
        "calibrated": shown.unit == FLOOR,
        "both_sides": "golden" in shown.ulp,
        "distributions": [each for each in _distributions(shown) if each[2]],
        "header": worst_header(shown),
        "rows": worst_rows(shown),
        "maps": maps,
    }


def _title(verdict: Verdict, shown: Portrait) -> str:
    failed = any(r.outcome is Outcome.FAIL and str(r.site) == shown.site for r in verdict.rows)
    if failed:
        return "The guilty site"
    if shown.instead is not None:
        return "The guilty place"
    return "The site with the largest R" if shown.unit == FLOOR else "The site of the largest error"


def experts(columns: Columns, verdict: Verdict) -> dict[str, Any]:
    """Return what the page says and draws of the experts; the text is empty where none routes."""
    site = load_site(verdict)
    loads = verdict.portrait.load if verdict.portrait else {}
    load = loads[site] if site else {}
    return {
        "panels": load_panels(loads),
        "panels_text": load_text(loads),
        "per_row": experts_per_row(loads),
        "text": agreement_text(columns),
        "agreement": agreement_by_layer(columns),
        "load": load_figure(load) if load else "",
        "load_site": site,
    }


def _distributions(shown: Portrait) -> list[tuple[str, str, str]]:
    believed = "reference" if shown.unit == FLOOR else "golden"
    return [
        (
            "Errors in ULP",
            f"Distance from the {believed}, in representable numbers of {shown.ulp_dtype}.",
            ulp_histogram(shown),
        ),
        (
            "Q-Q plot",
            "(side − reference) / floor against a normal. Rounding keeps near the dashed line.",
            quantile_plot(shown),
        ),
    ]
