"""Draw how the errors of the guilty site are distributed: in ULP, and against a normal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from layerparity.ground.numeral import numeral, percent, power
from layerparity.record.portrait import ULP_EDGES, Portrait
from layerparity.report.svg import box, canvas, hover, tag, text

_LEFT, _TOP, _RIGHT, _BOTTOM = 52.0, 24.0, 12.0, 46.0
_WIDTH, _HEIGHT = 356.0, 210.0
_EIGHTH = {0.125: "⅛", 0.25: "¼", 0.5: "½"}
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_CLOSE = 14.0
Place = Callable[[float], float]


def ulp_histogram(portrait: Portrait) -> str:
    """Return the histogram of a site's errors in units of the last place, or nothing.

    Bars are the candidate, steps the golden where there is a reference to tell its error from.
    """
    counts = portrait.ulp.get("candidate", [])
    total, one = sum(counts), ULP_EDGES.index(1.0)
    if not total:
        return ""
    filled = [n for each in portrait.ulp.values() for n, count in enumerate(each) if count]
    first, last = min(*filled, one), max(*filled, one)
    shares = {}
    for name, each in portrait.ulp.items():
        elements = max(sum(each), 1)
        shares[name] = [count / elements for count in each[first : last + 1]]
    most = max(max(each) for each in shares.values())
    pitch = (_WIDTH - _LEFT - _RIGHT) / (last - first + 1)
    bars = []
    for n, share in enumerate(shares["candidate"]):
        words = hover(f"{_bin(first + n)}: {counts[first + n]} elements, {percent(share)}")
        height = _HEIGHT * share / most
        shape = box(_LEFT + n * pitch + 1, _TOP + _HEIGHT - height, max(pitch - 2, 1), height)
        bars.append(tag("path", words, class_="bar1", d=shape))
    golden = _steps(shares["golden"], pitch, most) if "golden" in shares else ""
    beyond = percent(sum(counts[one + 1 :]) / total)
    return canvas(
        _WIDTH,
        _TOP + _HEIGHT + _BOTTOM,
        f"Errors in units of the last place of {portrait.ulp_dtype}",
        f"{total} elements; {beyond} are off by more than one.",
        _scale(most),
        *bars,
        golden,
        _bins_axis(first, last, pitch),
        _upwards("share of the elements, in %"),
    )


def quantile_plot(portrait: Portrait) -> str:
    """Return the Q-Q plot of the normalised error against a normal, or nothing.

    Upwards the scale is linear near zero and logarithmic beyond (asinh).
    """
    normal, candidate = (portrait.quantiles.get(n, []) for n in ("normal", "candidate"))
    if len(normal) < 2 or len(candidate) != len(normal):
        return ""
    reach = max(4.0, *(abs(value) for each in portrait.quantiles.values() for value in each))
    across = max(map(abs, normal))

    def x(value: float) -> float:
        return _LEFT + (value / across + 1) / 2 * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (1 - math.asinh(value) / math.asinh(reach)) / 2 * _HEIGHT

    line = "M" + "L".join(f"{x(each):.1f} {y(each):.1f}" for each in normal)
    golden = portrait.quantiles.get("golden", [])
    return canvas(
        _WIDTH,
        _TOP + _HEIGHT + _BOTTOM,
        "Quantiles of (side − reference) / floor, against a normal distribution",
        f"The candidate's reach from {numeral(candidate[0])} to {numeral(candidate[-1])}.",
        _grid(reach, y),
        tag("path", class_="limit", d=line, fill="none"),
        _dots(list(zip(normal, golden, strict=False)), x, y, "s4 hollow"),
        _dots(list(zip(normal, candidate, strict=True)), x, y, "s1"),
        _normal_axis(across, x),
        _upwards("(side − reference) / floor"),
    )


def _bin(index: int) -> str:
    """Return a bin in words: ``exact``, ``up to 4 ULP`` or ``more than 16777216 ULP``."""
    if index == 0:
        return "exact"
    if index == len(ULP_EDGES):
        return f"more than {numeral(ULP_EDGES[-1])} ULP"
    return f"up to {numeral(ULP_EDGES[index])} ULP"


def _tick(index: int) -> str:
    if index == 0:
        return "0"
    if index == len(ULP_EDGES):
        return "more"
    edge = ULP_EDGES[index]
    if edge < 1000:
        return _EIGHTH.get(edge, f"{edge:.0f}")
    return f"2{str(round(math.log2(edge))).translate(_RAISED)}"


def _steps(shares: Sequence[float], pitch: float, most: float) -> str:
    path = f"M{_LEFT:.1f} {_TOP + _HEIGHT:.1f}"
    for index, share in enumerate(shares):
        path += f"V{_TOP + _HEIGHT * (1 - share / most):.1f}H{_LEFT + (index + 1) * pitch:.1f}"
    return tag("path", class_="outline", d=f"{path}V{_TOP + _HEIGHT:.1f}")


def _scale(most: float) -> str:
    parts = []
    for share in (0.0, most / 2, most):
        y = _TOP + _HEIGHT * (1 - share / most)
        parts.append(tag("path", class_="grid", d=f"M{_LEFT:.1f} {y:.1f}H{_WIDTH - _RIGHT:.1f}"))
        parts.append(text(_LEFT - 8, y + 4, percent(share), text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _bins_axis(first: int, last: int, pitch: float) -> str:
    every = max(math.ceil(30 / pitch), 1)
    parts = []
    for n in range(0, last - first + 1, every):
        x = _LEFT + (n + 0.5) * pitch
        parts.append(text(x, _TOP + _HEIGHT + 17, _tick(first + n), text_anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    words = "off by up to so many ULP"
    label = text(middle, _TOP + _HEIGHT + 37, words, class_="axis", text_anchor="middle")
    return tag("g", *parts, label, class_="ticks")


def _grid(reach: float, y: Place) -> str:
    decades = range(0, math.floor(math.log10(reach)) + 1)
    every = max(math.ceil(len(decades) / 4), 1)
    sizes = [10.0**d for d in decades if d % every == 0 and y(0) - y(10.0**d) > _CLOSE]
    marks = [0.0, *(sign * size for size in sizes for sign in (1, -1))]
    parts = []
    for value in marks:
        at = y(value)
        parts.append(tag("path", class_="grid", d=f"M{_LEFT:.1f} {at:.1f}H{_WIDTH - _RIGHT:.1f}"))
        shown = power(value, 0) if abs(value) >= 1000 else numeral(value)
        parts.append(text(_LEFT - 8, at + 4, shown.replace("-", "−"), text_anchor="end"))
    return tag("g", *parts, class_="ticks")


def _normal_axis(across: float, x: Place) -> str:
    whole = range(-math.floor(across), math.floor(across) + 1)
    parts = [
        text(x(n), _TOP + _HEIGHT + 17, f"{n}σ".replace("-", "−"), text_anchor="middle")
        for n in whole
    ]
    words = "quantiles of a normal distribution"
    label = text(x(0), _TOP + _HEIGHT + 37, words, class_="axis", text_anchor="middle")
    return tag("g", *parts, label, class_="ticks")


def _upwards(words: str) -> str:
    """Return the name of the vertical axis, above its upper end."""
    return tag("g", text(4, _TOP - 12, words, class_="axis"), class_="ticks")


def _dots(points: Sequence[tuple[float, float]], x: Place, y: Place, series: str) -> str:
    drawn = []
    for normal, value in points:
        words = hover(f"{normal:g}σ: {numeral(value)}")
        dot = tag("circle", class_=f"dot {series}", cx=x(normal), cy=y(value), r=3)
        drawn.append(tag("g", words, dot))
    return "".join(drawn)
