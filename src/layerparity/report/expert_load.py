"""Draw how many tokens each expert got, experts downwards and layers across, side by side.

Three panels: the golden's load, the candidate's on the same scale, and what moved. A panel is as
wide as a phone, whatever the model: many experts share a row, many layers have narrow columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerparity.anatomy.site import Site
from layerparity.report.svg import STEPS, box, canvas, hover, tag, text

Load = Mapping[str, Mapping[str, Sequence[int]]]
Grid = Sequence[Sequence[float]]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 284.0, 40.0, 8.0, 22.0, 42.0
_SIDES = ("golden", "candidate")
_MOST_ROWS = 64
_PLOT, _TALLEST, _WIDEST = 256.0, 16.0, 40.0
_MOVED = 4
_LABEL_ROOM = 22.0


@dataclass(frozen=True)
class Panel:
    """One of the three figures: its title, and its markup."""

    title: str
    figure: str


@dataclass(frozen=True)
class Board:
    """Where cells stand: a column for each layer that routes, a row for ``size`` experts."""

    layers: Sequence[int]
    experts: int

    @property
    def size(self) -> int:
        """Experts in a row; the last row may hold fewer."""
        return max(math.ceil(self.experts / _MOST_ROWS), 1)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.ceil(self.experts / self.size)

    @property
    def height(self) -> float:
        """Height of a row in pixels."""
        return min(_PLOT / self.rows, _TALLEST)

    @property
    def pitch(self) -> float:
        """Width of a column in pixels."""
        return min((_WIDTH - _LEFT - _RIGHT) / len(self.layers), _WIDEST)

    @property
    def bottom(self) -> float:
        """Where the rows end."""
        return _TOP + self.rows * self.height

    def cell(self, column: int, row: int) -> str:
        """Return path data of a cell, a hair's gap beside it where there is room."""
        gap = 1.0 if min(self.pitch, self.height) > 6 else 0.0
        x, y = _LEFT + column * self.pitch, _TOP + row * self.height
        return box(x, y, self.pitch - gap, self.height - gap)

    def binned(self, values: Sequence[float]) -> list[float]:
        """Return the value of each row: of its experts' values the one furthest from 0."""
        starts = range(0, len(values), self.size)
        return [max(values[at : at + self.size], key=abs) for at in starts]


def experts_per_row(load: Load) -> int:
    """Return how many experts one row of the panels stands for."""
    return _board(load).size if load else 1


def load_panels(load: Load) -> list[Panel]:
    """Return the panels of loads by site and side; none where fewer than two layers route."""
    if len(load) < 2:
        return []
    board, sites = _board(load), _in_order(load)
    golden, candidate = ([list(load[site][side]) for site in sites] for side in _SIDES)
    most = max(1, *(max(each, default=0) for each in (*golden, *candidate)))
    moved = [_difference(*pair) for pair in zip(golden, candidate, strict=True)]
    furthest = max(1.0, *(max(map(abs, each), default=0.0) for each in moved))
    lost = [int(sum(map(abs, each))) // 2 for each in moved]
    words = [
        f"{gone} of {sum(each)} choices moved" for gone, each in zip(lost, golden, strict=True)
    ]
    return [
        _panel(board, "Golden", golden, _shade(most), words),
        _panel(board, "Candidate", candidate, _shade(most), words),
        _panel(board, "Candidate − golden", moved, _sign(furthest), words),
    ]


def load_text(load: Load) -> str:
    """Say how far the scales of the panels reach; empty where there are none."""
    if len(load) < 2:
        return ""
    most = max(max(each) for sides in load.values() for each in sides.values() if each)
    moved = [_difference(*(sides[name] for name in _SIDES)) for sides in load.values()]
    furthest = max(max(map(abs, each), default=0.0) for each in moved)
    if not furthest:
        return f"The scale ends at {most} tokens. No expert's load differs."
    return f"The scale ends at {most} tokens; the largest difference is {furthest:.0f}."


def _in_order(load: Load) -> list[str]:
    return sorted(load, key=Site.parse)


def _board(load: Load) -> Board:
    layers = [Site.parse(site).layer or 0 for site in _in_order(load)]
    return Board(layers, max(len(each) for sides in load.values() for each in sides.values()))


def _difference(golden: Sequence[float], candidate: Sequence[float]) -> list[float]:
    return [float(right - left) for left, right in zip(golden, candidate, strict=True)]


def _shade(most: float) -> Callable[[float], str]:
    """Return the class of a load: an empty cell, or an even step of the scale up to ``most``."""
    return lambda value: f"q{math.ceil(value / most * STEPS) - 1}" if value else "qz"


def _sign(furthest: float) -> Callable[[float], str]:
    """Return the class of a difference: which side has more, in a few steps of strength."""

    def classed(value: float) -> str:
        if not value:
            return "lane"
        strength = math.ceil(abs(value) / furthest * _MOVED)
        return f"{'more' if value > 0 else 'less'}{strength}"

    return classed


def _panel(
    board: Board, title: str, values: Grid, classed: Callable[[float], str], words: Sequence[str]
) -> Panel:
    """Draw one panel. Cells of one class are one path: a large model has 4,000 of them."""
    paths: dict[str, list[str]] = {}
    for column, of_layer in enumerate(values):
        for row, value in enumerate(board.binned(of_layer)):
            paths.setdefault(classed(value), []).append(board.cell(column, row))
    cells = [tag("path", class_=name, d="".join(each)) for name, each in sorted(paths.items())]
    # A clear strip over each column says how much moved there.
    strips = []
    for column, (layer, each) in enumerate(zip(board.layers, words, strict=True)):
        shape = box(_LEFT + column * board.pitch, _TOP, board.pitch, board.bottom - _TOP)
        said = hover(f"layer {layer}: {each}")
        strips.append(tag("path", said, d=shape, fill="none", pointer_events="all"))
    drawn = canvas(
        _WIDTH,
        board.bottom + _BOTTOM,
        f"{title}: tokens of each expert by layer",
        f"{board.experts} experts downwards, {len(board.layers)} layers across.",
        *cells,
        *strips,
        _axes(board),
    )
    return Panel(title, drawn)


def _axes(board: Board) -> str:
    every = max(math.ceil(_LABEL_ROOM / board.height), 1)
    parts = [
        text(
            _LEFT - 6,
            _TOP + (row + 0.5) * board.height + 4,
            str(row * board.size),
            text_anchor="end",
        )
        for row in range(0, board.rows, every)
    ]
    parts.append(text(0, _TOP - 8, "expert", class_="axis"))
    step = max(math.ceil(_LABEL_ROOM / board.pitch), 1)
    for column in range(0, len(board.layers), step):
        x = _LEFT + (column + 0.5) * board.pitch
        parts.append(text(x, board.bottom + 16, str(board.layers[column]), text_anchor="middle"))
    middle = _LEFT + len(board.layers) * board.pitch / 2
    parts.append(text(middle, board.bottom + 34, "layer", class_="axis", text_anchor="middle"))
    return tag("g", *parts, class_="ticks")
