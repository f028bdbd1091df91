"""Draw where the time went: seconds by what they were for, bytes read and memory held.

It is as wide as a phone. Seconds that held the run up stand above the axis, those of the threads
that read for it hang below, on one scale; under them lie the bytes read and the memory held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from layerparity.anatomy.site import Site
from layerparity.ground.console import bytes_text
from layerparity.ground.numeral import numeral
from layerparity.ground.profile import PARTS, RunProfile, StageProfile
from layerparity.record.verdict import Verdict
from layerparity.report.svg import box, canvas, hover, tag, text

_NONE = "–"
Cells = list[str]


@dataclass(frozen=True)
class SideTime:
    """One side: its role, a sentence about it, its figure, and the totals of its stages."""

    role: str
    sentence: str
    figure: str
    total: StageProfile


@dataclass(frozen=True)
class WhereTimeWent:
    """What the section shows; without ``sides`` there is no section.

    ``rows`` and ``loading`` are a table's lines, a label and a cell for each side: the seconds that
    held the run up, and what was read for it.
    """

    sides: list[SideTime]
    rows: list[Cells]
    loading: list[Cells]
    whole: Cells

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Return (part, what it is called) of what some stage spent time on, for the key."""
        totals = [side.total for side in self.sides]
        return [(p, words) for p, words in PARTS.items() if any(getattr(t, p) for t in totals)]

    @property
    def threads(self) -> list[str]:
        """Return what some reading thread spent time on, for the key."""
        totals = [side.total.loading for side in self.sides]
        return [part for part in LOADING if any(getattr(total, part) for total in totals)]


def where_time_went(verdict: Verdict) -> WhereTimeWent:
    """Return where the time of both sides went, as far as their runs say."""
    sides = []
    both = (
        ("golden", verdict.golden, verdict.candidate),
        ("candidate", verdict.candidate, verdict.golden),
    )
    for role, side, other in both:
        if side.profile is not None and side.profile.stages:
            total = side.profile.total
            sentence = _sentence(role, len(side.made), total)
            sides.append(
                SideTime(role, sentence, time_by_stage(role, side.profile, other.profile), total)
            )
    totals = [side.total for side in sides]
    rows = [[words, *(_share(t, part) for t in totals)] for part, words in PARTS.items()]
    whole = ["in all", *(seconds_text(total.seconds) for total in totals)]
    return WhereTimeWent(sides, rows, list(_loading(totals)), whole)


def time_table(verdict: Verdict) -> tuple[Cells, list[Cells]]:
    """Return the header and the lines of the totals; no lines where no run says."""
    went = where_time_went(verdict)
    if not went.sides:
        return [], []
    header = ["", *(side.role for side in went.sides)]
    return header, [*went.rows, went.whole, *went.loading]


def _sentence(role: str, runs: int, total: StageProfile) -> str:
    """Say what a side spent most of its time on: ``Golden: 3.1 s, most of it (82 %) reference.``"""
    most = max(PARTS, key=lambda part: getattr(total, part))
    share = getattr(total, most) / total.seconds if total.seconds else 0.0
    over = f" over {runs} runs" if runs > 1 else ""
    kind = "most of it" if share > 0.5 else "the largest part"
    return (
        f"{role.capitalize()}: {seconds_text(total.seconds)}{over}, "
        f"{kind} ({share * 100:.0f} %) {PARTS[most]}."
    )


def _share(total: StageProfile, part: str) -> str:
    seconds = getattr(total, part)
    if not seconds:
        return _NONE
    share = 100 * seconds / total.seconds
    return f"{seconds_text(seconds)}, {f'{share:.0f}' if share >= 0.5 else '< 1'} %"


def _loading(totals: Sequence[StageProfile]) -> Iterator[Cells]:
    """Yield the lines of what was read: seconds of the threads, bytes, rate and memory."""
    read = [total.loading for total in totals]
    if any(each.seconds for each in read):
        for part in LOADING:
            seconds = (getattr(each, part) for each in read)
            yield [f"threads: {part}", *(seconds_text(s) if s else _NONE for s in seconds)]
    if any(each.bytes for each in read):
        yield ["bytes read", *(bytes_text(each.bytes) if each.bytes else _NONE for each in read)]
        yield ["read at", *(f"{bytes_text(e.rate)}/s" if e.rate else _NONE for e in read)]
    yield ["memory at most", *(bytes_text(total.peak) for total in totals)]


LOADING = ("read", "convert", "hash")

_WIDTH, _LEFT, _RIGHT = 320.0, 44.0, 8.0
_PITCH = (3.0, 40.0)
_TOP, _PLOT = 26.0, 190.0
_CAPTION, _STRIP = 24.0, 30.0
_BOTTOM = 40.0
_LABEL_ROOM = 22.0
_TICKS = 5


@dataclass(frozen=True)
class Bars:
    """Where things stand: a column for each stage, seconds above and below one axis.

    ``before`` are the bytes of memory that were held before the first stage. The stages ``beside``
    are another figure's, which has the same scale of seconds.
    """

    before: int
    stages: Sequence[tuple[str, StageProfile]]
    beside: Sequence[StageProfile] = ()

    @cached_property
    def scaled(self) -> list[StageProfile]:
        """The stages of all figures that share a scale."""
        return [*(each for _, each in self.stages), *self.beside]

    @cached_property
    def pitch(self) -> float:
        """Width of a column in whole pixels: between narrow columns a fraction leaves seams."""
        room = (_WIDTH - _LEFT - _RIGHT) // max(len(self.stages), 1)
        return min(max(room, _PITCH[0]), _PITCH[1])

    @cached_property
    def right(self) -> float:
        """Where the last column ends."""
        return _LEFT + self.pitch * len(self.stages)

    @cached_property
    def up(self) -> float:
        """The most seconds that a stage held a run up."""
        return max((each.seconds for each in self.scaled), default=0.0)

    @cached_property
    def down(self) -> float:
        """The most seconds that the reading threads spent on a stage."""
        return max((each.loading.seconds for each in self.scaled), default=0.0)

    def y(self, seconds: float) -> float:
        """Return a height in pixels from the top; negative seconds are below the axis."""
        whole = self.up + self.down or 1.0
        return _TOP + _PLOT * (self.up - seconds) / whole

    def bar(self, column: int, top: float, seconds: float) -> str:
        """Return path data of a bar of some seconds that ends at ``top`` seconds."""
        return self.column(column, self.y(top), self.y(0) - self.y(seconds))

    def column(self, column: int, y: float, height: float) -> str:
        """Return path data of a bar in pixels, with a gap beside it where there is room."""
        gap = 1.0 if self.pitch > 6 else 0.0
        return box(_LEFT + column * self.pitch, y, self.pitch - gap, height)


def seconds_text(seconds: float) -> str:
    """Return a span of time in the unit a person would use: 12 ms, 3.4 s, 7.5 min."""
    if seconds < 0.9995:
        return f"{numeral(seconds * 1000)} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def time_by_stage(side: str, profile: RunProfile, beside: RunProfile | None = None) -> str:
    """Return the figure of one side (``golden`` or ``candidate``), on the scale of both."""
    others = list(beside.stages.values()) if beside is not None else []
    bars = Bars(profile.before, list(profile.stages.items()), others)
    strips = _strips(bars)
    bottom = _TOP + _PLOT + len(strips) * (_CAPTION + _STRIP)
    total = profile.total
    return canvas(
        max(bars.right + _RIGHT, _WIDTH),
        bottom + _BOTTOM,
        f"Seconds of the {side} by stage",
        f"{seconds_text(total.seconds)} in all, {bytes_text(total.loading.bytes)} read.",
        _scale(bars),
        *_stacked(bars),
        *strips,
        *_clear_strips(bars, bottom),
        _axis(bars, bottom),
    )


def _stacked(bars: Bars) -> list[str]:
    """Draw the bars. Those of one part are one path: a large model has hundreds."""
    paths: dict[str, list[str]] = {}
    for column, (_, each) in enumerate(bars.stages):
        above, below = 0.0, 0.0
        for part in PARTS:
            seconds = getattr(each, part)
            above += seconds
            if seconds:
                paths.setdefault(part, []).append(bars.bar(column, above, seconds))
        for part in LOADING:
            seconds = getattr(each.loading, part)
            if seconds:
                paths.setdefault(part, []).append(bars.bar(column, -below, seconds))
            below += seconds
    return [tag("path", class_=f"part-{part}", d="".join(d)) for part, d in paths.items()]


def _strips(bars: Bars) -> list[str]:
    """Draw bytes read and memory held, each on a scale of its own; none where nothing is known."""
    values: list[tuple[str, Callable[[StageProfile], float]]] = [
        ("read", lambda each: each.loading.bytes),
        ("memory", lambda each: max(each.peak - bars.before, 0)),
    ]
    drawn: list[str] = []
    for words, value in values:
        most = max((value(each) for _, each in bars.stages), default=0.0)
        if most:
            foot = _TOP + _PLOT + (len(drawn) + 1) * (_CAPTION + _STRIP)
            top = foot - _STRIP
            said = text(_LEFT, top - 5, f"{words}, at most {bytes_text(most)} in a stage")
            heights = [value(each) / most * _STRIP for _, each in bars.stages]
            shapes = (bars.column(n, foot - h, h) for n, h in enumerate(heights) if h)
            strip = tag("path", class_="strip", d="".join(shapes))
            line = tag("path", class_="grid", d=f"M{_LEFT:.1f} {foot:.1f}H{bars.right:.1f}")
            drawn.append(tag("g", said, class_="ticks") + strip + line)
    return drawn


def _scale(bars: Bars) -> str:
    """Draw the lines and numbers of both directions, in milliseconds below one second.

    Lines are 1, 2, 5, 10, 20, ... or their tenths apart.
    """
    unit, name = (1.0, "s") if max(bars.up, bars.down) >= 1 else (1e-3, "ms")
    least = (bars.up + bars.down) / unit / _TICKS
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    parts = [text(_LEFT - 6, _TOP - 12, name, class_="axis", text_anchor="end")]
    for tick in range(-math.floor(bars.down / unit / step), math.floor(bars.up / unit / step) + 1):
        y = bars.y(tick * step * unit)
        parts.append(tag("path", class_="grid", d=f"M{_LEFT:.1f} {y:.1f}H{bars.right:.1f}"))
        parts.append(text(_LEFT - 6, y + 4, f"{abs(tick) * step:g}", text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _clear_strips(bars: Bars, bottom: float) -> Iterator[str]:
    """Lay a clear strip over each column that says all of its numbers."""
    for column, (stage, each) in enumerate(bars.stages):
        said = [f"{words} {seconds_text(getattr(each, part))}" for part, words in PARTS.items()]
        loading = [f"{part} {seconds_text(getattr(each.loading, part))}" for part in LOADING]
        above = max(each.peak - bars.before, 0)
        words = (
            f"{stage}: {seconds_text(each.seconds)}: {', '.join(said)}. Reading threads: "
            f"{', '.join(loading)}; {bytes_text(each.loading.bytes)}. Memory {bytes_text(above)}"
        )
        shape = box(_LEFT + column * bars.pitch, _TOP, bars.pitch, bottom - _TOP)
        yield tag("path", hover(words), d=shape, fill="none", pointer_events="all")


def _axis(bars: Bars, bottom: float) -> str:
    """Draw the zero line, the layers' numbers, and in words what the columns are."""
    zero = tag("path", class_="outline", d=f"M{_LEFT:.1f} {bars.y(0):.1f}H{bars.right:.1f}")
    layers = [Site(stage, "in").layer for stage, _ in bars.stages]
    parts, free = [], _LEFT
    for column, layer in enumerate(layers):
        x = _LEFT + (column + 0.5) * bars.pitch
        if layer is not None and x >= free:
            parts.append(text(x, bottom + 16, str(layer), text_anchor="middle"))
            free = x + _LABEL_ROOM
    names = [stage if Site(stage, "in").layer is None else "layer" for stage, _ in bars.stages]
    said = ", ".join(name for name, _ in groupby(names))
    parts.append(text(_LEFT, bottom + 34, said, class_="axis"))
    return zero + tag("g", *parts, class_="ticks")
