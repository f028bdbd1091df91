"""Figure: layer x metric, the worst value of each layer on each metric's own scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerparity.compare.report.columns import AXIS, LEFT, Columns
from layerparity.compare.report.measure import Measure
from layerparity.compare.report.measures import beyond, compared
from layerparity.compare.report.shade import Shade, key
from layerparity.compare.report.svg import box, canvas, hover, tag, text
from layerparity.verdict import Row

_TOP = 30.0
_HEIGHT = 26.0
_PRINT_FROM = 56.0


@dataclass(frozen=True)
class Cell:
    """The worst value of a metric in one column, and the row it comes from."""

    column: int
    row: Row
    value: float
    error: float


@dataclass(frozen=True)
class Line:
    """One metric across the columns, with the limits that its cells are held against."""

    columns: Columns
    measure: Measure
    limits: dict[str, float]

    def cells(self) -> list[Cell]:
        """Return the worst cell of each column that has the metric."""
        cells = []
        for index, stage in enumerate(self.columns.stages):
            found = [
                Cell(index, row, value, self.measure.badness(value))
                for row in stage.rows
                if (value := row.metrics.get(self.measure.name)) is not None
            ]
            if found:
                cells.append(max(found, key=_order))
        return cells

    def draw(self, y: float) -> str:
        """Draw the label, the cells on the metric's own scale, and the worst value beside them."""
        cells = self.cells()
        shade = self._shade(cells)
        right, middle = self.columns.right, y + _HEIGHT / 2 + 4
        worst = self.measure.show(max(cells, key=_order).value)
        return tag(
            "g",
            text(LEFT - 10, middle, self.measure.label, text_anchor="end"),
            tag("path", class_="track", d=box(LEFT, y, right - LEFT, _HEIGHT - 2)),
            *(self._cell(cell, shade, y) for cell in cells),
            text(right + 8, middle, worst, class_="quiet"),
            class_="ticks",
        )

    def _shade(self, cells: list[Cell]) -> Shade:
        limit = self.limits.get(self.measure.name)
        error = 0.0 if limit is None else self.measure.allowed(limit)
        return Shade.over((cell.error for cell in cells), self.measure.wrong, error)

    def _cell(self, cell: Cell, shade: Shade, y: float) -> str:
        shown = self.measure.show(cell.value)
        fill, ink = shade.classes(cell.error)
        x, width = self.columns.left(cell.column), self.columns.pitch - 1
        words = f"{cell.row.site}: {self.measure.label} {shown}, {cell.row.outcome.value}"
        parts = [hover(words), tag("path", class_=fill, d=box(x, y, width, _HEIGHT - 2))]
        if beyond(cell.row, self.measure, self.limits):
            parts.append(tag("path", class_=ink, d=f"M{x + width - 7:.1f} {y:.1f}h7v7z"))
        if self.columns.pitch >= _PRINT_FROM:
            at = {"class_": f"value {ink}", "text_anchor": "middle"}
            parts.append(text(x + width / 2, y + 16, shown, **at))
        return tag("g", *parts)


def metric_heatmap(columns: Columns, limits: dict[str, float]) -> str:
    """Return the figure as markup, or an empty string where no row has a metric.

    A cell beyond its limit has a corner mark. Values are printed where the columns are wide enough.
    """
    measures = compared(row for stage in columns.stages for row in stage.rows)
    if not measures:
        return ""
    lines = [Line(columns, measure, limits) for measure in measures]
    bottom = _TOP + _HEIGHT * len(lines)
    drawn = canvas(
        columns.width,
        bottom + AXIS,
        "Worst value of each metric by layer",
        f"{len(lines)} metrics by {len(columns.stages)} layers and modules; "
        "the tables below hold the same numbers.",
        columns.first_failure(_TOP, 0),
        *(line.draw(_TOP + n * _HEIGHT) for n, line in enumerate(lines)),
        columns.axis(bottom),
    )
    limited = bool(limits.keys() & {measure.name for measure in measures})
    return key("better", "worse", limited) + drawn


def _order(cell: Cell) -> float:
    return math.inf if math.isnan(cell.error) else cell.error
