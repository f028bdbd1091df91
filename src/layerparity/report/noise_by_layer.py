"""Draw error against the noise floor by layer, block by block and as it adds up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from layerparity.ground.numeral import numeral
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.columns import AXIS, TOP, Axis, Columns, grid
from layerparity.report.error_by_layer import SHAPES, sample
from layerparity.report.svg import box, canvas, hover, tag

BLOCK_OUT = ":out"
Points = dict[int, float]


@dataclass(frozen=True)
class Curve:
    """One value in some columns; ``quiet`` ones are background, drawn without markers."""

    words: str
    points: Points
    series: int
    quiet: bool = False


@dataclass(frozen=True)
class Drawing:
    """What a figure shows: curves over the band under ``floors``, and one up to ``limit`` times."""

    title: str
    curves: Sequence[Curve]
    floors: Points
    words: str
    limit: float = 0.0

    @property
    def is_shown(self) -> bool:
        """Whether there is a curve, and a band that goes on."""
        return len(self.floors) > 1 and any(curve.points for curve in self.curves)

    @property
    def values(self) -> list[float]:
        """All that has a height."""
        values = [value for curve in self.curves for value in curve.points.values()]
        floors = self.floors.values()
        return [*values, *floors, *(self.limit * floor for floor in floors if self.limit)]


def local_error(columns: Columns, verdict: Verdict, local: str) -> str:
    """Return the figure of one class of site: its error over the band of its noise floor.

    Errors are against the reference, relative to it. Its scale is `accumulated_error`'s. Empty
    where fewer than two blocks have a floor there.
    """
    return _figure(columns, _local(columns, verdict, local), _accumulated(columns, verdict))


def accumulated_error(columns: Columns, verdict: Verdict, local: str = "") -> str:
    """Return the figure of the blocks' outputs: what has added up, over what clean rounding would.

    Independent rounding errors add up in squares: the band is the root of the sum of the squared
    local floors of the blocks passed, each taken to pass errors on as they are. A chained
    candidate's error is its own; of an isolated one the local errors are added up alike. Its scale
    is that of `local_error` at the class of site ``local``.
    """
    return _figure(columns, _accumulated(columns, verdict), _local(columns, verdict, local))


def _local(columns: Columns, verdict: Verdict, local: str) -> Drawing:
    rows = _rows(columns, local)
    floors = _values(rows, lambda row: row.metrics["floor_rel_l2"])
    limit = verdict.limits.get("error_ratio", 0.0)
    band = f"noise floor{f', and {numeral(limit)} times it' if limit else ''}"
    curves = [
        Curve("golden", _values(rows, lambda row: _error(row, "golden_error_ratio")), 4, True),
        Curve("candidate", _values(rows, lambda row: _error(row, "error_ratio")), 1),
    ]
    return Drawing("Error against the noise floor, by layer", curves, floors, band, limit)


def _accumulated(columns: Columns, verdict: Verdict) -> Drawing:
    rows = _rows(columns, BLOCK_OUT)
    errors = _values(rows, _candidate)
    floors = _values(rows, lambda row: row.metrics["floor_rel_l2"])
    if verdict.feed == "isolated":
        curves = [Curve("the candidate's local errors, added up", _grown(errors), 1)]
    else:
        clean = Curve("clean computations, chained", floors, 4, True)
        curves = [clean, Curve("the candidate, chained", errors, 1)]
        local = verdict.portrait.local_floors if verdict.portrait else {}
        floors = {i: local[str(row.site)] for i, row in rows if str(row.site) in local}
    title = "Accumulated error at the block out, by layer"
    return Drawing(title, curves, _grown(floors), "clean rounding, added up")


def _figure(columns: Columns, shown: Drawing, beside: Drawing) -> str:
    """Draw a figure on the scale that it shares with the one ``beside`` it."""
    if not shown.is_shown:
        return ""
    curves, floors, words, limit = shown.curves, shown.floors, shown.words, shown.limit
    axis = Axis.over([*shown.values, *(beside.values if beside.is_shown else ())])
    summary = f"{words}: from {numeral(min(floors.values()))} to {numeral(max(floors.values()))}."
    drawn = canvas(
        columns.width,
        axis.bottom + AXIS,
        shown.title,
        summary,
        _band(columns, axis, floors, limit, "band far") if limit else "",
        _band(columns, axis, floors, 1.0, "band"),
        grid(columns, axis, "rel L2"),
        columns.first_failure(TOP, axis.bottom - TOP),
        *(_curve(columns, axis, curve) for curve in curves),
        columns.axis(axis.bottom),
    )
    return _key(curves, words) + drawn


def _rows(columns: Columns, local: str) -> list[tuple[int, Row]]:
    """Return, by column, the worst row with a floor of one class of site inside the blocks."""
    found = []
    for index, stage in enumerate(columns.stages):
        rows = [r for r in stage.rows if r.site.local == local and "floor_rel_l2" in r.metrics]
        if rows and stage.layer is not None:
            found.append((index, max(rows, key=_candidate)))
    return found


def _values(rows: Sequence[tuple[int, Row]], value: Callable[[Row], float]) -> Points:
    return {index: value(row) for index, row in rows}


def _candidate(row: Row) -> float:
    return _error(row, "error_ratio")


def _error(row: Row, ratio: str) -> float:
    """Return the relative error against the reference: R times the floor."""
    if row.outcome is Outcome.FAIL and not math.isfinite(row.metrics.get("rel_l2", 0.0)):
        return math.inf
    return row.metrics.get(ratio, 0.0) * row.metrics["floor_rel_l2"]


def _grown(local: Points) -> Points:
    """Return the root of the running sum of squares."""
    total, found = 0.0, {}
    for index, value in sorted(local.items()):
        total += value * value
        found[index] = math.sqrt(total)
    return found


def _band(columns: Columns, axis: Axis, floors: Points, times: float, style: str) -> str:
    bottom = axis.y(10.0**axis.low)
    shapes = []
    for index, floor in floors.items():
        top = min(axis.y(times * floor), bottom) if floor else bottom
        words = hover(f"{columns.stages[index].name}: {numeral(times * floor)}")
        # A hair of overlap: neighbours that only touch leave a seam between them.
        shape = box(columns.left(index), top, columns.pitch + 0.5, bottom - top)
        shapes.append(tag("path", words, class_=style, d=shape))
    return "".join(shapes)


def _curve(columns: Columns, axis: Axis, curve: Curve) -> str:
    path, previous = "", None
    for index, value in sorted(curve.points.items()):
        joined = previous == index - 1
        path += f"{'L' if joined else 'M'}{columns.centre(index):.1f} {axis.y(value):.1f}"
        previous = index
    drawn = [tag("path", class_=f"line s{curve.series}", d=path)]
    size = " scale(.7)" if columns.pitch < 24 else ""
    for index, value in () if curve.quiet else curve.points.items():
        words = hover(f"{columns.stages[index].name}, {curve.words}: {numeral(value)}")
        at = f"translate({columns.centre(index):.1f} {axis.y(value):.1f}){size}"
        dot = tag("path", class_=f"dot s{curve.series}", d=SHAPES[0])
        drawn.append(tag("g", words, dot, transform=at))
    return "".join(drawn)


def _key(curves: Sequence[Curve], words: str) -> str:
    items = []
    for curve in reversed(curves):
        line = tag("path", class_=f"line s{curve.series}", d="M-11 0h22")
        dot = "" if curve.quiet else tag("path", class_=f"dot s{curve.series}", d=SHAPES[0])
        items.append(tag("li", sample(line, dot), f" {escape(curve.words)}"))
    swatch = tag("i", "", class_="swatch wband", aria_hidden="true")
    items.append(tag("li", swatch, f" {escape(words)}"))
    return tag("ul", *items, class_="key")
