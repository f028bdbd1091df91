"""Figure: token x layer, the relative L2 error of every token at one class of site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerparity.compare.report.columns import AXIS, LEFT, Columns
from layerparity.compare.report.measures import numeral
from layerparity.compare.report.shade import Shade, key
from layerparity.compare.report.stages import called
from layerparity.compare.report.svg import box, canvas, hover, tag, text

_TOP = 30.0
_PLOT = 460.0
_MOST_BINS = 96
_TALLEST = 18.0
_LABEL_ROOM = 26.0
TokenErrors = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Bins:
    """Tokens put together ``size`` at a time, so that ``count`` rows hold them all."""

    tokens: int

    @property
    def size(self) -> int:
        """Tokens in one row; the last row may hold fewer."""
        return max(math.ceil(self.tokens / _MOST_BINS), 1)

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.ceil(self.tokens / self.size)

    @property
    def height(self) -> float:
        """Height of a row in pixels."""
        return min(_PLOT / self.count, _TALLEST)

    def name(self, index: int) -> str:
        """Return ``token 7`` or ``tokens 8-15``."""
        first = index * self.size
        last = min(first + self.size, self.tokens) - 1
        return f"token {first}" if first == last else f"tokens {first}–{last}"

    def largest(self, errors: Sequence[float]) -> list[float]:
        """Return the largest error of each row; NaN counts as the largest."""
        starts = range(0, len(errors), self.size)
        return [max(errors[start : start + self.size], key=_order) for start in starts]


def errors_by_column(columns: Columns, token_errors: TokenErrors, local: str) -> list[list[float]]:
    """Return each column's token errors at one class of site, decode steps after the prefill.

    Outside the blocks every site counts as ``:out``: the map of the blocks' output is whole.
    """
    found = []
    for stage in columns.stages:
        tokens: list[float] = []
        for row in stage.rows:
            here = ":out" if stage.layer is None else row.site.local
            if here == local:
                tokens.extend(token_errors.get(str(row.site), ()))
        found.append(tokens)
    return found


def token_heatmap(columns: Columns, token_errors: TokenErrors, local: str) -> str:
    """Return the figure of a class of site as markup, or an empty string if it has no errors."""
    by_column = errors_by_column(columns, token_errors, local)
    bins = Bins(max((len(tokens) for tokens in by_column), default=0))
    if not bins.tokens:
        return ""
    shown = [bins.largest(errors) for errors in by_column]
    shade = Shade.over(error for errors in shown for error in errors)
    cells = [_column(columns, index, bins, shade, errors) for index, errors in enumerate(shown)]
    bottom = _TOP + bins.height * bins.count
    track = tag("path", class_="track", d=box(LEFT, _TOP, columns.right - LEFT, bottom - _TOP))
    drawn = canvas(
        columns.width,
        bottom + AXIS,
        f"Error of each token by layer, at the {called(local)}",
        f"{bins.tokens} tokens downwards, {len(columns.stages)} layers and modules across.",
        columns.first_failure(_TOP, 0),
        track,
        *cells,
        _rows(bins),
        columns.axis(bottom),
    )
    return key("rel L2 ≤ " + numeral(10.0**shade.low), numeral(10.0**shade.high)) + drawn


def binning(columns: Columns, token_errors: TokenErrors, local: str) -> int:
    """Return how many tokens one row of the figure holds (their largest error is shown)."""
    by_column = errors_by_column(columns, token_errors, local)
    return Bins(max((len(tokens) for tokens in by_column), default=0)).size


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
    every = max(math.ceil(_LABEL_ROOM / bins.height), 1)
    parts = []
    for index in range(0, bins.count, every):
        y = _TOP + (index + 0.5) * bins.height + 4
        parts.append(text(LEFT - 10, y, str(index * bins.size), text_anchor="end"))
    parts.append(text(LEFT - 10, _TOP - 8, "token", class_="axis", text_anchor="end"))
    return tag("g", *parts, class_="ticks")
