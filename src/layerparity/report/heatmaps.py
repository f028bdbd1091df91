"""Draw heat maps by layer: of the groups of a site, of tokens, and of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerparity.anatomy.block import label
from layerparity.anatomy.site import Site
from layerparity.ground.numeral import numeral
from layerparity.record.portrait import FLOOR, Portrait
from layerparity.record.verdict import Outcome, Row
from layerparity.report.columns import AXIS, LEFT, Columns
from layerparity.report.gauge import Limits
from layerparity.report.measure import Measure
from layerparity.report.measures import beyond, compared
from layerparity.report.stages import Stage
from layerparity.report.svg import Shade, box, canvas, hover, key, tag, text

_TOP = 30.0
_PLOT = 460.0
_MOST_BINS = 96
_TALLEST = 18.0
_LABEL_ROOM = 26.0
_ANCHOR = "the limit or the largest that passes"


@dataclass(frozen=True)
class Bins:
    """Tokens (or what else ``noun`` says), put together so that ``count`` rows hold them all.

    Each of the ``tokens`` values may stand for ``each`` of them already, ``total`` in all.
    """

    tokens: int
    noun: str = "token"
    each: int = 1
    total: int = 0

    @property
    def size(self) -> int:
        """Values in one row; the last row may hold fewer."""
        return max(math.ceil(self.tokens / _MOST_BINS), 1)

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.ceil(self.tokens / self.size)

    @property
    def per_row(self) -> int:
        """How many tokens one row stands for."""
        return self.size * self.each

    @property
    def height(self) -> float:
        """Height of a row in pixels."""
        return min(_PLOT / self.count, _TALLEST)

    def name(self, index: int) -> str:
        """Return ``token 7`` or ``tokens 8-15``."""
        first = index * self.per_row
        last = min(first + self.per_row, self.total or self.tokens * self.each) - 1
        return f"{self.noun} {first}" if first == last else f"{self.noun}s {first}–{last}"

    def largest(self, errors: Sequence[float]) -> list[float]:
        """Return the largest error of each row; NaN counts as the largest."""
        starts = range(0, len(errors), self.size)
        return [max(errors[start : start + self.size], key=_order) for start in starts]


@dataclass(frozen=True)
class Cells:
    """The errors of a figure, a list for each column, and by column those of sites that pass.

    ``limit`` is what they are held against, 0 where nothing is; ``wrong`` is no rounding for
    certain.
    """

    errors: Sequence[Sequence[float]]
    passing: Sequence[float]
    limit: float = 0.0
    wrong: float = 1.0


@dataclass(frozen=True)
class Said:
    """The words of a figure: its title, its summary, and what its colours mean."""

    title: str
    summary: str
    quantity: str


def heat_grid(columns: Columns, found: Cells, bins: Bins, said: Said) -> str:
    """Return a figure of errors, pale where they are within the limit or where sites pass."""
    shown = [bins.largest(errors) for errors in found.errors]
    every = (error for errors in shown for error in errors)
    shade = Shade.over(every, found.passing, found.limit, found.wrong)
    # A hair of overlap instead of a gap where rows are thin: gaps of a fraction shimmer.
    height = bins.height - 1 if bins.height > 10 else bins.height
    cells = []
    for index, errors in enumerate(shown):
        x, width, where = columns.left(index), columns.pitch - 1, columns.stages[index].name
        for number, error in enumerate(errors):
            words = hover(f"{where}, {bins.name(number)}: {numeral(error)}")
            shape = box(x, _TOP + number * bins.height, width, height)
            cells.append(tag("path", words, class_=shade.classes(error)[0], d=shape))
    bottom = _TOP + bins.height * bins.count
    track = tag("path", class_="track", d=box(LEFT, _TOP, columns.right - LEFT, bottom - _TOP))
    drawn = canvas(
        columns.width,
        bottom + AXIS,
        said.title,
        said.summary,
        columns.first_failure(_TOP, 0),
        track,
        *cells,
        _rows(bins),
        columns.axis(bottom),
    )
    anchor, most = (numeral(float(f"{10.0**each:.3g}")) for each in (shade.limit, shade.high))
    return key(said.quantity, most, f"{anchor}, {_ANCHOR}") + drawn


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _rows(bins: Bins) -> str:
    every = max(math.ceil(_LABEL_ROOM / bins.height), 1) if bins.count > 8 else 1
    parts = []
    for index in range(0, bins.count, every):
        y = _TOP + (index + 0.5) * bins.height + 4
        parts.append(text(LEFT - 10, y, str(index * bins.per_row), text_anchor="end"))
    parts.append(text(LEFT - 10, _TOP - 8, bins.noun, class_="axis", text_anchor="end"))
    return tag("g", *parts, class_="ticks")


GROUPS = ("head", "channel", "expert")
# A group that is so many noise floors off is no rounding; of its own size, nor is the whole of it.
_WRONG = 100.0


def group_heatmap(columns: Columns, portrait: Portrait, group: str, limits: Limits) -> str:
    """Return the figure as markup, or an empty string where the site has no such groups."""
    found = portrait.groups.get(group)
    if found is None:
        return ""
    by_column: list[list[float]] = []
    passing: list[float] = []
    for stage in columns.stages:
        row = next((row for row in stage.rows if str(row.site) in found.values), None)
        by_column.append([] if row is None else found.values[str(row.site)])
        passing += by_column[-1] if row is not None and row.outcome is not Outcome.FAIL else []
    bins = Bins(max((len(each) for each in by_column), default=0), group, found.size, found.count)
    if not bins.tokens:
        return ""
    calibrated = portrait.unit == FLOOR
    said = Said(
        f"Error of each {group} by layer, at the {label(Site.parse(portrait.site).local)}",
        f"{found.count} {group}s downwards, {len(columns.stages)} layers and modules across.",
        "R" if calibrated else "rel L2",
    )
    limit = limits.get(f"error_ratio_{group}", 0.0) if calibrated else 0.0
    cells = Cells(by_column, passing, limit, _WRONG if calibrated else 1.0)
    return heat_grid(columns, cells, bins, said)


def per_row(portrait: Portrait, group: str) -> int:
    """Return how many groups one row of the figure holds (the largest of theirs is shown)."""
    found = portrait.groups[group]
    longest = max(len(each) for each in found.values.values())
    return Bins(longest, group, found.size).per_row


TokenErrors = Mapping[str, Sequence[float]]


def errors_by_column(columns: Columns, token_errors: TokenErrors, local: str) -> list[list[float]]:
    """Return each column's token errors at one class of site, decode steps after the prefill.

    Outside the blocks a stage's own ends count as ``:out``: the map of the blocks' output is whole.
    """
    return [
        [error for row in stage.rows for error in _of_tokens(stage, row, token_errors, local)]
        for stage in columns.stages
    ]


def _of_tokens(stage: Stage, row: Row, token_errors: TokenErrors, local: str) -> Sequence[float]:
    here = ":out" if row.site.path == stage.key and stage.layer is None else row.site.local
    return token_errors.get(str(row.site), ()) if here == local else ()


def token_heatmap(
    columns: Columns, token_errors: TokenErrors, local: str, noun: str = "token"
) -> str:
    """Return the figure of a class of site as markup, or an empty string if it has no errors.

    ``noun`` is what a row is one of, or several.
    """
    by_column = errors_by_column(columns, token_errors, local)
    bins = Bins(max((len(tokens) for tokens in by_column), default=0), noun)
    if not bins.tokens:
        return ""
    said = Said(
        f"Error of each {noun} by layer, at the {label(local)}",
        f"{bins.tokens} {noun}s downwards, {len(columns.stages)} layers and modules across.",
        "rel L2",
    )
    passing = [
        error
        for stage in columns.stages
        for row in stage.rows
        if row.outcome is not Outcome.FAIL
        for error in _of_tokens(stage, row, token_errors, local)
    ]
    return heat_grid(columns, Cells(by_column, passing), bins, said)


def binning(columns: Columns, token_errors: TokenErrors, local: str) -> int:
    """Return how many tokens one row of the figure holds (their largest error is shown)."""
    by_column = errors_by_column(columns, token_errors, local)
    return Bins(max((len(tokens) for tokens in by_column), default=0)).size


_MARGIN_TOP = 30.0
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
                # A larger one that broke no limit, as it is not significant, does not hide one.
                cells.append(
                    max(found, key=lambda c: (beyond(c.row, self.measure), _order(c.error)))
                )
        return cells

    def draw(self, y: float) -> str:
        """Draw the label, the cells on the metric's own scale, and the worst value beside them."""
        cells = self.cells()
        limit = self.limits.get(self.measure.name)
        allowed = 0.0 if limit is None else self.measure.allowed(limit)
        passing = [cell.error for cell in cells if cell.row.outcome is not Outcome.FAIL]
        errors = (cell.error for cell in cells)
        shade = Shade.over(errors, passing, allowed, self.measure.wrong)
        right, middle = self.columns.right, y + _HEIGHT / 2 + 4
        worst = max(cells, key=lambda cell: _order(cell.error))
        return tag(
            "g",
            text(LEFT - 10, middle, self.measure.label, text_anchor="end"),
            tag("path", class_="track", d=box(LEFT, y, right - LEFT, _HEIGHT - 2)),
            *(self._cell(cell, shade, y) for cell in cells),
            text(right + 8, middle, self.measure.show(worst.value), class_="quiet"),
            class_="ticks",
        )

    def _cell(self, cell: Cell, shade: Shade, y: float) -> str:
        shown = self.measure.show(cell.value)
        fill, ink = shade.classes(cell.error)
        x, width = self.columns.left(cell.column), self.columns.pitch - 1
        words = f"{cell.row.site}: {self.measure.label} {shown}, {cell.row.outcome.value}"
        parts = [hover(words), tag("path", class_=fill, d=box(x, y, width, _HEIGHT - 2))]
        if beyond(cell.row, self.measure):
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
    bottom = _MARGIN_TOP + _HEIGHT * len(lines)
    drawn = canvas(
        columns.width,
        bottom + AXIS,
        "Worst value of each metric by layer",
        f"{len(lines)} metrics by {len(columns.stages)} layers and modules; "
        "the tables below hold the same numbers.",
        columns.first_failure(_MARGIN_TOP, 0),
        *(line.draw(_MARGIN_TOP + n * _HEIGHT) for n, line in enumerate(lines)),
        columns.axis(bottom),
    )
    limited = any(row.breaches for stage in columns.stages for row in stage.rows)
    return key("better", "worse", _ANCHOR, limited) + drawn
