"""Heat grid: what all figures with groups downwards and layers across share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.compare.report.columns import AXIS, LEFT, Columns
from layerparity.compare.report.measure import numeral
from layerparity.compare.report.shade import Shade, key
from layerparity.compare.report.svg import box, canvas, hover, tag, text

_TOP = 30.0
_PLOT = 460.0
_MOST_BINS = 96
_TALLEST = 18.0
_LABEL_ROOM = 26.0


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
class Said:
    """The words of a figure: its title, its summary, and what its colours mean."""

    title: str
    summary: str
    quantity: str


def heat_grid(
    columns: Columns, by_column: Sequence[Sequence[float]], bins: Bins, said: Said, wrong: float
) -> str:
    """Return a figure of errors, a list for each column; ``wrong`` is no rounding for certain."""
    shown = [bins.largest(errors) for errors in by_column]
    shade = Shade.over((error for errors in shown for error in errors), wrong)
    cells = [_column(columns, index, bins, shade, errors) for index, errors in enumerate(shown)]
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
    return key(f"{said.quantity} ≤ {numeral(10.0**shade.low)}", numeral(10.0**shade.high)) + drawn


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _column(columns: Columns, index: int, bins: Bins, shade: Shade, errors: Sequence[float]) -> str:
    # A hair of overlap instead of a gap where rows are thin: gaps of a fraction shimmer.
    height = bins.height - 1 if bins.height > 10 else bins.height
    x, width, where = columns.left(index), columns.pitch - 1, columns.stages[index].name
    drawn = []
    for number, error in enumerate(errors):
        words = hover(f"{where}, {bins.name(number)}: {numeral(error)}")
        shape = box(x, _TOP + number * bins.height, width, height)
        drawn.append(tag("path", words, class_=shade.classes(error)[0], d=shape))
    return "".join(drawn)


def _rows(bins: Bins) -> str:
    every = max(math.ceil(_LABEL_ROOM / bins.height), 1) if bins.count > 8 else 1
    parts = []
    for index in range(0, bins.count, every):
        y = _TOP + (index + 0.5) * bins.height + 4
        parts.append(text(LEFT - 10, y, str(index * bins.per_row), text_anchor="end"))
    parts.append(text(LEFT - 10, _TOP - 8, bins.noun, class_="axis", text_anchor="end"))
    return tag("g", *parts, class_="ticks")
