"""Where the time went: both runs' seconds by what they were for, bytes read and memory held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerparity.compare.comparison import Comparison, Side
from layerparity.compare.report.time_by_stage import (
    LOADING,
    seconds_text,
    time_by_stage,
)
from layerparity.console import bytes_text
from layerparity.profile import PARTS, RunProfile, StageProfile

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


def where_time_went(comparison: Comparison) -> WhereTimeWent:
    """Return where the time of both sides went, as far as their runs say."""
    sides = [
        _side(role, side, side.profile)
        for role, side in (("golden", comparison.golden), ("candidate", comparison.candidate))
        if side.profile is not None and side.profile.stages
    ]
    totals = [side.total for side in sides]
    rows = [[words, *(_share(t, part) for t in totals)] for part, words in PARTS.items()]
    whole = ["in all", *(seconds_text(total.seconds) for total in totals)]
    return WhereTimeWent(sides, rows, list(_loading(totals)), whole)


def time_table(comparison: Comparison) -> tuple[Cells, list[Cells]]:
    """Return the header and the lines of the totals; no lines where no run says."""
    found = where_time_went(comparison)
    if not found.sides:
        return [], []
    header = ["", *(side.role for side in found.sides)]
    return header, [*found.rows, found.whole, *found.loading]


def _side(role: str, side: Side, profile: RunProfile) -> SideTime:
    total = profile.total
    sentence = _sentence(role, len(side.made), total)
    return SideTime(role, sentence, time_by_stage(role, profile), total)


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
            yield [f"threads: {part}", *(_seconds(getattr(each, part)) for each in read)]
    if any(each.bytes for each in read):
        yield ["bytes read", *(bytes_text(each.bytes) if each.bytes else _NONE for each in read)]
        yield ["read at", *(f"{bytes_text(e.rate)}/s" if e.rate else _NONE for e in read)]
    yield ["memory at most", *(bytes_text(total.peak) for total in totals)]


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds else _NONE
