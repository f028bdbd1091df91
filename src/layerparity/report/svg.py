"""Write well-formed markup: a function for an element, a few for what all figures draw.

The stops are picked by hand in OKLCH (lightness, chroma, hue in degrees), a space in which equal
steps look equal. Lightness alone orders the colours, so a colour-blind reader or a grey printout
loses nothing. The light theme runs from pale to dark and the dark theme from dark to pale, so in
both of them what is worse stands out more from the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


def tag(name: str, *inner: str, **attributes: object) -> str:
    """Return an element; ``inner`` is markup already, attribute values are escaped.

    ``class_`` is written ``class``, other underscores as hyphens; an attribute of None is left out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            spelled = key.rstrip("_").replace("_", "-")
            parts.append(f'{spelled}="{escape(_short(value))}"')
    opened = " ".join(parts)
    return f"<{opened}>{''.join(inner)}</{name}>" if inner else f"<{opened}/>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Return an SVG text element with its words escaped."""
    return tag("text", escape(words), x=x, y=y, **attributes)


def hover(words: str) -> str:
    """Return the <title> that a pointer resting on the enclosing element shows."""
    return tag("title", escape(words))


def box(x: float, y: float, width: float, height: float) -> str:
    """Return path data of a rectangle; shorter than <rect>, and a heat map has thousands."""
    return f"M{_short(x)} {_short(y)}h{_short(width)}v{_short(height)}h-{_short(width)}z"


def canvas(width: float, height: float, title: str, summary: str, *inner: str) -> str:
    """Return a whole figure: an SVG read out as one image.

    On a page that is too narrow for it, it shrinks until its words would be too small to read, and
    then its box scrolls.
    """
    drawn = tag(
        "svg",
        tag("title", escape(title)),
        tag("desc", escape(summary)),
        *inner,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width,
        height=height,
        style=f"min-width:{_short(_LEAST * width)}px",
        role="img",
        aria_label=f"{title}. {summary}",
    )
    return tag("div", drawn, class_="scroll", tabindex=0, role="group", aria_label=title)


# The share of its size to which a figure may shrink: words of 12 pixels are then 8.6 tall.
_LEAST = 0.72


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


STEPS = 16
_LIGHT = (
    (0.955, 0.030, 100.0),
    (0.825, 0.115, 82.0),
    (0.695, 0.160, 52.0),
    (0.565, 0.180, 20.0),
    (0.435, 0.150, -20.0),
    (0.305, 0.110, -55.0),
)
_DARK = (
    (0.260, 0.045, -75.0),
    (0.395, 0.130, -40.0),
    (0.530, 0.175, 2.0),
    (0.665, 0.165, 42.0),
    (0.800, 0.125, 76.0),
    (0.935, 0.060, 100.0),
)
Triple = tuple[float, float, float]


def ramp(dark: bool = False) -> list[str]:
    """Return ``STEPS`` colours as ``#rrggbb``, the least error first."""
    stops = _DARK if dark else _LIGHT
    colours = (_srgb(*_between(stops, step / (STEPS - 1))) for step in range(STEPS))
    numbers = ([round(255 * min(max(part, 0.0), 1.0)) for part in each] for each in colours)
    return ["#" + "".join(f"{number:02x}" for number in each) for each in numbers]


def ink_on(colour: str) -> str:
    """Return black or white, whichever reads better on a colour ``#rrggbb`` (at least 4.5 to 1)."""
    # Black on a colour of luminance y has contrast (y + .05) / .05, white has 1.05 / (y + .05).
    return "#000000" if (luminance(colour) + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def luminance(colour: str) -> float:
    """Return the relative luminance (0 to 1) of a colour ``#rrggbb``, as WCAG defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def stylesheet() -> str:
    """Return the CSS of the heat classes: ``q0``.. fill a cell, ``t0``.. fill the text on it."""
    rules = [f".q{i}{{fill:var(--q{i})}}.t{i}{{fill:var(--t{i})}}" for i in range(STEPS)]
    swatches = [f".w{i}{{background:var(--q{i})}}" for i in range(STEPS)]
    dark = f"@media screen and (prefers-color-scheme: dark){{:root{{{_variables(dark=True)}}}}}"
    return "\n".join([f":root{{{_variables(dark=False)}}}", dark, *rules, *swatches])


def _variables(dark: bool) -> str:
    return "".join(f"--q{i}:{c};--t{i}:{ink_on(c)};" for i, c in enumerate(ramp(dark)))


def _between(stops: tuple[Triple, ...], position: float) -> Triple:
    """Return the OKLCH triple at a position from 0 to 1 along the stops."""
    scaled = position * (len(stops) - 1)
    at = min(int(scaled), len(stops) - 2)
    share = scaled - at
    low, high = stops[at], stops[at + 1]
    return (
        low[0] + share * (high[0] - low[0]),
        low[1] + share * (high[1] - low[1]),
        low[2] + share * (high[2] - low[2]),
    )


def _srgb(lightness: float, chroma: float, hue: float) -> Triple:
    """Convert OKLCH to sRGB; components outside 0..1 are colours that a screen does not have."""
    a = chroma * math.cos(math.radians(hue))
    b = chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _gamma(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
        _gamma(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
        _gamma(-0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short),
    )


def _gamma(linear: float) -> float:
    if linear <= 0.0031308:
        return 12.92 * linear
    return 1.055 * math.pow(linear, 1 / 2.4) - 0.055


# Decades that an error which is wrong for certain lies above the scale, at the least and usually.
_ABOVE, _DECADES = 2.0, 3.0
# The first steps of the ramp, pale ones, are for errors within the limit; these are for others.
_CALM, _LOUD = 3, 6


@dataclass(frozen=True)
class Shade:
    """A scale of errors: even up to a limit, logarithmic beyond it; both are exponents of ten.

    An error within the limit is pale, whatever the others are; one beyond it never is.
    """

    limit: float
    high: float

    @classmethod
    def over(
        cls,
        errors: Iterable[float],
        passing: Iterable[float] = (),
        limit: float = 0.0,
        wrong: float = 1.0,
    ) -> Shade:
        """Fit a scale to errors, of which the ``passing`` ones broke no limit.

        It is anchored at the ``limit``, or at the largest error that passes where that is larger or
        there is no limit. Without either it is far below one that is ``wrong`` for certain.
        """
        found = [math.log10(error) for error in errors if 0 < error < math.inf]
        kept = [error for error in (limit, *passing) if 0 < error < math.inf]
        anchor = math.log10(max(kept, default=wrong * 10**-_DECADES))
        return cls(anchor, max([anchor + _ABOVE, *found]))

    def step(self, error: float) -> int:
        """Return the step of a positive finite error."""
        size = math.log10(error)
        # Rounded, so that the very error that is the anchor does not lie beyond it.
        if round(size, 9) <= round(self.limit, 9):
            return min(int(_CALM * 10.0 ** (size - self.limit)), _CALM - 1)
        share = (size - self.limit) / (self.high - self.limit)
        return min(_LOUD + int(share * (STEPS - _LOUD)), STEPS - 1)

    def classes(self, error: float) -> tuple[str, str]:
        """Return the CSS classes of a cell and of the text on it."""
        if error == 0:
            return "qz", "tz"
        if not math.isfinite(error):
            return "qn", "tn"
        step = self.step(error)
        return f"q{step}", f"t{step}"


def key(least: str, most: str, anchor: str, limited: bool = False) -> str:
    """Return the key of a heat map as a list: the scale between its ends, and special cells.

    ``anchor`` says what the pale colours end at.
    """
    calm, loud = (
        tag(
            "span",
            "".join(tag("i", "", class_=f"w{step}") for step in steps),
            class_="scale",
            aria_hidden="true",
        )
        for steps in (range(_CALM), range(_LOUD, STEPS))
    )
    items = [
        tag("li", escape(least), " ", calm, " ", escape(anchor), " ", loud, " ", escape(most)),
        _item("wz", "error exactly 0"),
        _item("wn", "NaN or infinite"),
        _item("wb", "no value"),
    ]
    if limited:
        items.append(tag("li", "◥ beyond its limit"))
    return tag("ul", *items, class_="key")


def _item(swatch: str, words: str) -> str:
    return tag("li", tag("i", "", class_=f"swatch {swatch}", aria_hidden="true"), f" {words}")
