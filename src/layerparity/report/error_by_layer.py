"""Draw relative L2 error by layer on a logarithmic axis, a line for each class of site."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from layerparity.anatomy.block import label
from layerparity.record.verdict import Outcome, Row
from layerparity.report.columns import AXIS, LEFT, TOP, Axis, Columns, grid
from layerparity.report.measures import REL_L2
from layerparity.report.stages import Stage, severity
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
Point = tuple[int, Row]


def error_by_layer(columns: Columns, limit: float | None = None) -> str:
    """Return the figure as markup, or an empty string where no row has a relative L2 error.

    ``limit`` draws the tolerance's own limit on the relative L2 error, where it has one.
    """
    series, left_out = _series(columns.stages)
    outside = _points(columns.stages, None)
    everything = [point for points in series.values() for point in points] + outside
    if not everything:
        return ""
    axis = Axis.over([_value(row) for _, row in everything] + ([limit] if limit else []))
    lines = [
        _line(columns, axis, points, f"s{n}", SHAPES[n]) for n, points in enumerate(series.values())
    ]
    least, worst = (pick((row for _, row in everything), key=severity) for pick in (min, max))
    drawn = canvas(
        columns.width,
        axis.bottom + AXIS,
        "Relative L2 error by layer",
        f"From {_numeral_of(least)} to {_numeral_of(worst)}.",
        grid(columns, axis, REL_L2.label),
        _limit(columns, axis, limit),
        columns.first_failure(TOP, axis.bottom - TOP),
        *lines,
        _markers(columns, axis, outside, "so", _OUTSIDE),
        columns.axis(axis.bottom),
    )
    return _key(list(series), bool(outside), left_out, columns.failing is not None) + drawn


def _series(found: Sequence[Stage]) -> tuple[dict[str, list[Point]], int]:
    """Return the points of each drawn class of site, and how many classes are left to the table."""
    locals_ = {row.site.local for stage in found if stage.layer is not None for row in stage.rows}
    every = {local: points for local in locals_ if (points := _points(found, local))}
    head = [local for local in _FIRST if local in every]
    largest = {local: max(severity(row) for _, row in every[local]) for local in every}
    rest = sorted(every.keys() - set(head), key=lambda name: (-largest[name], name))
    drawn = (head + rest)[:_MOST_SERIES]
    return {local: every[local] for local in drawn}, len(every) - len(drawn)


def _points(found: Sequence[Stage], local: str | None) -> list[Point]:
    """Return the worst row of each stage at a site inside the blocks, or (None) outside them."""
    points = []
    for index, stage in enumerate(found):
        if (stage.layer is None) is (local is None):
            rows = [r for r in stage.rows if local in (None, r.site.local)]
            rows = [row for row in rows if REL_L2.name in row.metrics]
            if rows:
                points.append((index, max(rows, key=severity)))
    return points


def _value(row: Row) -> float:
    return row.metrics[REL_L2.name]


def _line(columns: Columns, axis: Axis, points: list[Point], series: str, shape: str) -> str:
    path, previous = "", None
    for index, row in points:
        layer = columns.stages[index].layer
        # A layer that was not compared leaves a gap: a line across it would claim a value there.
        joined = previous is not None and layer == previous + 1
        path += f"{'L' if joined else 'M'}{columns.centre(index):.1f} {axis.y(_value(row)):.1f}"
        previous = layer
    stroke = tag("path", class_=f"line {series}", d=path)
    return stroke + _markers(columns, axis, points, series, shape)


def _markers(columns: Columns, axis: Axis, points: list[Point], series: str, shape: str) -> str:
    narrow = columns.pitch < _NARROW
    size = " scale(.7)" if narrow else ""
    markers = []
    for index, row in points:
        words = f"{row.site}: rel L2 {REL_L2.show(_value(row))}, {row.outcome.value}"
        # Among many layers rings would hide the lines; there only the first failure gets them.
        ringed = row.outcome is Outcome.FAIL and (index == columns.failing or not narrow)
        ring = tag("circle", class_="ring", r=9 if narrow else 7.5) if ringed else ""
        at = f"translate({columns.centre(index):.1f} {axis.y(_value(row)):.1f}){size}"
        dot = tag("path", class_=f"dot {series}", d=shape)
        markers.append(tag("g", hover(words), ring, dot, transform=at))
    return "".join(markers)


def _limit(columns: Columns, axis: Axis, limit: float | None) -> str:
    if not limit:
        return ""
    y = axis.y(limit)
    line = tag("path", class_="limit", d=f"M{LEFT:.1f} {y:.1f}H{columns.right:.1f}")
    return line + text(columns.right + 6, y + 4, "limit", class_="mark")


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


def _numeral_of(row: Row) -> str:
    """Return ``<relative L2> at <site>``."""
    return f"{REL_L2.show(_value(row))} at {row.site}"
