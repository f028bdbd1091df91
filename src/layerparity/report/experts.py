"""Figures: whether both sides chose the same experts, by layer, and how much work each got."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.anatomy.site import Site
from layerparity.record.verdict import Row, Verdict
from layerparity.report.columns import AXIS, LEFT, Columns
from layerparity.report.svg import box, canvas, hover, tag, text

_AGREEMENT = "set_agreement"
_TOP, _HEIGHT = 30.0, 110.0
_PITCH = (5.0, 40.0)
_WIDEST = 940.0


def agreement_by_layer(columns: Columns) -> str:
    """Return the share of tokens whose expert sets agree, a bar for each layer.

    Nothing where no layer routes, or every token agrees everywhere.
    """
    rows = _by_column(columns)
    if all(row.metrics[_AGREEMENT] == 1.0 for _, row in rows):
        return ""
    least = min(row.metrics[_AGREEMENT] for _, row in rows)
    return canvas(
        columns.width,
        _TOP + _HEIGHT + AXIS,
        "Share of tokens sent to the same experts, by layer",
        f"The least is {least:.1%}.",
        _scale(columns.right),
        columns.first_failure(_TOP, _HEIGHT),
        *(_share(columns, index, row) for index, row in rows),
        columns.axis(_TOP + _HEIGHT),
    )


def agreement_text(columns: Columns) -> str:
    """Say in a sentence how far both sides chose the same experts; empty where none routes."""
    rows = _by_column(columns)
    if not rows:
        return ""
    apart = [(index, row) for index, row in rows if row.metrics[_AGREEMENT] < 1.0]
    if not apart:
        return f"Both sides sent every token to the same experts, in all {len(rows)} layers."
    flips = sum(row.metrics.get("flips", 0.0) for _, row in apart)
    outside = sum(row.metrics.get("flips_outside_noise", 0.0) for _, row in apart)
    words = f"Expert sets differ in {len(apart)} of {len(rows)} layers"
    if not flips:
        return f"{words}."
    return f"{words}: {flips:.0f} tokens, of which {outside:.0f} are no ties within the noise."


def load_site(verdict: Verdict) -> str:
    """Return the site whose expert load is shown: the guilty block's, else the most uneven."""
    portrait = verdict.portrait
    if portrait is None or not portrait.load:
        return ""
    layer = Site.parse(portrait.site).layer
    own = next((each for each in portrait.load if Site.parse(each).layer == layer), "")
    return own or max(portrait.load, key=lambda each: _moved(portrait.load[each]))


def load_figure(load: dict[str, list[int]]) -> str:
    """Return the tokens that each expert got on both sides, as pairs of bars."""
    golden, candidate = load["golden"], load["candidate"]
    most = max(*golden, *candidate, 1)
    pitch = min(max((_WIDEST - LEFT) / len(golden), _PITCH[0]), _PITCH[1])
    right = LEFT + pitch * len(golden)
    bars = [
        _pair(n, left, theirs, pitch, most)
        for n, (left, theirs) in enumerate(zip(golden, candidate, strict=True))
    ]
    return canvas(
        max(right + 20, 330.0),
        _TOP + _HEIGHT + 46,
        "Tokens of each expert on both sides",
        f"{_moved(load)} of {sum(golden)} choices went elsewhere.",
        _counts(most, right),
        *bars,
        _numbers(len(golden), pitch, right),
    )


def _moved(load: dict[str, list[int]]) -> int:
    pairs = zip(load["golden"], load["candidate"], strict=True)
    return sum(abs(left - right) for left, right in pairs) // 2


def _by_column(columns: Columns) -> list[tuple[int, Row]]:
    """Return, by column, the row with the least agreement."""
    found = []
    for index, stage in enumerate(columns.stages):
        rows = [r for r in stage.rows if _AGREEMENT in r.metrics and stage.layer is not None]
        if rows:
            found.append((index, min(rows, key=lambda row: row.metrics[_AGREEMENT])))
    return found


def _share(columns: Columns, index: int, row: Row) -> str:
    share = row.metrics[_AGREEMENT]
    height = _HEIGHT * share
    words = f"{row.site}: {share:.2%} of the tokens agree, {row.outcome.value}"
    x, width = columns.left(index) + 1, columns.pitch - 2
    shape = box(x, _TOP + _HEIGHT - height, width, height)
    return tag("path", hover(words), class_="bar0" if share == 1.0 else "bar1", d=shape)


def _scale(right: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(tag("path", class_="grid", d=f"M{LEFT:.1f} {y:.1f}H{right:.1f}"))
        parts.append(text(LEFT - 10, y + 4, f"{share:.0%}", text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _counts(most: int, right: float) -> str:
    parts = []
    for count in sorted({0, most // 2, most}):
        y = _TOP + _HEIGHT * (1 - count / most)
        parts.append(tag("path", class_="grid", d=f"M{LEFT:.1f} {y:.1f}H{right:.1f}"))
        parts.append(text(LEFT - 10, y + 4, str(count), text_anchor="end"))
    parts.append(text(LEFT - 10, _TOP - 10, "tokens", class_="axis", text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _pair(expert: int, golden: int, candidate: int, pitch: float, most: int) -> str:
    x, width = LEFT + expert * pitch, (pitch - 1) / 2
    words = hover(f"expert {expert}: golden {golden}, candidate {candidate}")
    return tag(
        "g",
        words,
        _bar(x, width, golden / most, "bar0"),
        _bar(x + width, width, candidate / most, "bar1"),
    )


def _bar(x: float, width: float, share: float, style: str) -> str:
    height = _HEIGHT * share
    return tag("path", class_=style, d=box(x, _TOP + _HEIGHT - height, width, height))


def _numbers(count: int, pitch: float, right: float) -> str:
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * pitch >= 22 or n == 64)
    labels: Sequence[str] = [
        text(LEFT + (n + 0.5) * pitch, _TOP + _HEIGHT + 17, str(n), text_anchor="middle")
        for n in range(0, count, every)
    ]
    middle = (LEFT + right) / 2
    words = text(middle, _TOP + _HEIGHT + 37, "expert", class_="axis", text_anchor="middle")
    return tag("g", *labels, words, class_="ticks")
