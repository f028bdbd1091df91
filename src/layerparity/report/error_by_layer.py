"""Draw what sites are judged by, by layer on a logarithmic axis, a line for a class of site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from layerparity.anatomy.block import label
from layerparity.ground.numeral import numeral
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.columns import AXIS, LEFT, TOP, Axis, Columns, grid
from layerparity.report.gauge import Limits, Ordinate
from layerparity.report.svg import canvas, hover, tag, text

_FIRST = (":out", "self_attn:out", "mlp:out", "mlp.gate:logits", ":in")
_MOST_SERIES = 6
_NARROW = 24.0
# One shape for each series, centred on the origin: a reader need not see the colours.
SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5l4.6 8h-9.2z",
    "M0-5l5 5l-5 5l-5-5z",
    "M0 5l4.6-8h-9.2z",
    "M-4.5-1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",
)
_OUTSIDE = "M-4-4h8v8h-8zM-2-2v4h4v-4z"


def error_by_layer(columns: Columns, verdict: Verdict) -> str:
    """Return the figure as markup, or an empty string where no row has an error of that kind.

    It shows R over its limit, or what else the verdict's tolerance judges; see `Ordinate`.
    """
    chart = Chart(columns, Ordinate.of(verdict), verdict.limits)
    series, left_out = chart.series()
    outside = chart.points(None)
    everything = [point for points in series.values() for point in points] + outside
    if not everything:
        return ""
    limit = chart.shown.limit
    axis = Axis.over([each.value for each in everything] + ([limit] if limit else []))
    lines = [
        chart.line(axis, points, f"s{n}", SHAPES[n]) for n, points in enumerate(series.values())
    ]
    least, worst = (pick(everything, key=_order) for pick in (min, max))
    drawn = canvas(
        columns.width,
        axis.bottom + AXIS,
        chart.shown.title,
        f"From {numeral(least.value)} at {least.row.site} to {numeral(worst.value)} at "
        f"{worst.row.site}.",
        grid(columns, axis, chart.shown.label),
        _limit(columns, axis, limit),
        columns.first_failure(TOP, axis.bottom - TOP),
        *lines,
        chart.markers(axis, outside, "so", _OUTSIDE),
        columns.axis(axis.bottom),
    )
    return _key(list(series), bool(outside), left_out, columns.failing is not None) + drawn


@dataclass(frozen=True)
class Point:
    """The worst value of a class of site in one column, and its row."""

    column: int
    row: Row
    value: float


@dataclass(frozen=True)
class Chart:
    """The columns of a figure, and what of their rows it shows."""

    columns: Columns
    shown: Ordinate
    limits: Limits

    def series(self) -> tuple[dict[str, list[Point]], int]:
        """Return the points of each drawn class of site, and how many classes are left out."""
        inside = [stage for stage in self.columns.stages if stage.layer is not None]
        locals_ = {row.site.local for stage in inside for row in stage.rows}
        every = {local: points for local in locals_ if (points := self.points(local))}
        head = [local for local in _FIRST if local in every]
        largest = {local: max(map(_order, every[local])) for local in every}
        rest = sorted(every.keys() - set(head), key=lambda name: (-largest[name], name))
        drawn = (head + rest)[:_MOST_SERIES]
        return {local: every[local] for local in drawn}, len(every) - len(drawn)

    def points(self, local: str | None) -> list[Point]:
        """Return the worst row of each stage at a site inside the blocks, or (None) outside."""
        points = []
        for index, stage in enumerate(self.columns.stages):
            if (stage.layer is None) is not (local is None):
                continue
            found = [
                Point(index, row, value)
                for row in stage.rows
                if local in (None, row.site.local)
                and (value := self.shown.value(row, self.limits)) is not None
            ]
            points += [max(found, key=_order)] if found else []
        return points

    def line(self, axis: Axis, points: Sequence[Point], series: str, shape: str) -> str:
        """Draw a class of site, block by block, with its markers."""
        path, previous = "", None
        for each in points:
            layer = self.columns.stages[each.column].layer
            # A layer that was not compared leaves a gap: a line across it would claim a value.
            joined = previous is not None and layer == previous + 1
            x, y = self.columns.centre(each.column), axis.y(each.value)
            path += f"{'L' if joined else 'M'}{x:.1f} {y:.1f}"
            previous = layer
        return tag("path", class_=f"line {series}", d=path) + self.markers(
            axis, points, series, shape
        )

    def markers(self, axis: Axis, points: Sequence[Point], series: str, shape: str) -> str:
        """Draw a sign at each point, and a ring around those that fail."""
        narrow = self.columns.pitch < _NARROW
        size = " scale(.7)" if narrow else ""
        markers = []
        for each in points:
            value = f"{self.shown.label} {numeral(each.value)}"
            words = f"{each.row.site}: {value}, {each.row.outcome.value}"
            # Among many layers rings would hide the lines; there only the first failure gets them.
            failed = each.row.outcome is Outcome.FAIL
            ringed = failed and (each.column == self.columns.failing or not narrow)
            ring = tag("circle", class_="ring", r=9 if narrow else 7.5) if ringed else ""
            x, y = self.columns.centre(each.column), axis.y(each.value)
            dot = tag("path", class_=f"dot {series}", d=shape)
            at = f"translate({x:.1f} {y:.1f}){size}"
            markers.append(tag("g", hover(words), ring, dot, transform=at))
        return "".join(markers)


def _order(point: Point) -> float:
    return math.inf if math.isnan(point.value) else point.value


def _limit(columns: Columns, axis: Axis, limit: float | None) -> str:
    if not limit:
        return ""
    y = axis.y(limit)
    line = tag("path", class_="limit", d=f"M{LEFT:.1f} {y:.1f}H{columns.right:.1f}")
    return line + text(columns.right + 6, y + 4, f"limit {numeral(limit)}", class_="mark")


def _key(drawn: list[str], outside: bool, left_out: int, failing: bool) -> str:
    items = [_item(f"s{n}", SHAPES[n], label(local)) for n, local in enumerate(drawn)]
    if outside:
        items.append(_item("so", _OUTSIDE, "outside the blocks"))
    if failing:
        items.append(tag("li", sample(tag("circle", class_="ring", r=6)), " failed"))
    if left_out:
        items.append(tag("li", f"{left_out} more in the table", class_="quiet"))
    return tag("ul", *items, class_="key")


def _item(series: str, shape: str, words: str) -> str:
    line = tag("path", class_=f"line {series}", d="M-11 0h22") if series != "so" else ""
    return tag(
        "li", sample(line, tag("path", class_=f"dot {series}", d=shape)), f" {escape(words)}"
    )


def sample(*drawn: str) -> str:
    """Draw the sign of a series in a key."""
    return tag("svg", *drawn, viewBox="-12 -8 24 16", width=24, height=16, aria_hidden="true")
