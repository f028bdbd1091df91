"""Draw whether both sides chose the same experts, by layer, and how much work each got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerparity.anatomy.site import Site
from layerparity.ground.numeral import percent
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
    bars = []
    for index, row in rows:
        share = row.metrics[_AGREEMENT]
        words = hover(f"{row.site}: {percent(share)} of the tokens agree, {row.outcome.value}")
        left, style = columns.left(index) + 1, "bar0" if share == 1.0 else "bar1"
        bars.append(_bar(left, columns.pitch - 2, share, style, words))
    levels = _levels({0.0: "0 %", 0.5: "50 %", 1.0: "100 %"}, columns.right)
    title = text(LEFT - 10, _TOP - 10, "tokens alike", class_="axis", text_anchor="end")
    return canvas(
        columns.width,
        _TOP + _HEIGHT + AXIS,
        "Share of tokens sent to the same experts, by layer",
        f"The least is {percent(least)}.",
        tag("g", *levels, title, class_="ticks"),
        columns.first_failure(_TOP, _HEIGHT),
        *bars,
        columns.axis(_TOP + _HEIGHT),
    )


def agreement_text(columns: Columns) -> str:
    """Say in a sentence how far both sides chose the same experts; empty where none routes."""
    rows = _by_column(columns)
    if not rows:
        return ""
    differing = [(index, row) for index, row in rows if row.metrics[_AGREEMENT] < 1.0]
    if not differing:
        return f"Both sides sent every token to the same experts, in all {len(rows)} layers."
    flips = sum(row.metrics.get("flips", 0.0) for _, row in differing)
    outside = sum(row.metrics.get("flips_outside_noise", 0.0) for _, row in differing)
    words = f"Expert sets differ in {len(differing)} of {len(rows)} layers"
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
    bars = []
    for n, pair in enumerate(zip(golden, candidate, strict=True)):
        left, width = LEFT + n * pitch, (pitch - 1) / 2
        words = hover(f"expert {n}: golden {pair[0]}, candidate {pair[1]}")
        first = _bar(left, width, pair[0] / most, "bar0")
        bars.append(tag("g", words, first, _bar(left + width, width, pair[1] / most, "bar1")))
    counts = {count / most: str(count) for count in sorted({0, most // 2, most})}
    title = text(LEFT - 10, _TOP - 10, "tokens", class_="axis", text_anchor="end")
    return canvas(
        max(right + 20, 330.0),
        _TOP + _HEIGHT + 46,
        "Tokens of each expert on both sides",
        f"{_moved(load)} of {sum(golden)} choices went elsewhere.",
        tag("g", *_levels(counts, right), title, class_="ticks"),
        *bars,
        _numbers(len(golden), pitch, right),
    )


def _moved(load: dict[str, list[int]]) -> int:
    pairs = zip(load["golden"], load["candidate"], strict=True)
    return sum(abs(left - right) for left, right in pairs) // 2


def _by_column(columns: Columns) -> list[tuple[int, Row]]:
    """Return, by column, the row with the least agreement."""
    least = []
    for index, stage in enumerate(columns.stages):
        rows = [r for r in stage.rows if _AGREEMENT in r.metrics and stage.layer is not None]
        if rows:
            least.append((index, min(rows, key=lambda row: row.metrics[_AGREEMENT])))
    return least


def _levels(words: Mapping[float, str], right: float) -> Iterator[str]:
    """Draw a line at each share of the whole height, and its words beside it."""
    for share, each in words.items():
        y = _TOP + _HEIGHT * (1 - share)
        yield tag("path", class_="grid", d=f"M{LEFT:.1f} {y:.1f}H{right:.1f}")
        yield text(LEFT - 10, y + 4, each, text_anchor="end")


def _bar(x: float, width: float, share: float, style: str, *inner: str) -> str:
    height = _HEIGHT * share
    return tag("path", *inner, class_=style, d=box(x, _TOP + _HEIGHT - height, width, height))


def _numbers(count: int, pitch: float, right: float) -> str:
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * pitch >= 22 or n == 64)
    labels: Sequence[str] = [
        text(LEFT + (n + 0.5) * pitch, _TOP + _HEIGHT + 17, str(n), text_anchor="middle")
        for n in range(0, count, every)
    ]
    middle = (LEFT + right) / 2
    words = text(middle, _TOP + _HEIGHT + 37, "expert", class_="axis", text_anchor="middle")
    return tag("g", *labels, words, class_="ticks")
