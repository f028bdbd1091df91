"""Well-formed markup from Python: a function for an element, a few for what all figures draw."""

from __future__ import annotations

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
    """Return a whole figure: an SVG read out as one image, in a box that scrolls if it is wide."""
    drawn = tag(
        "svg",
        tag("title", escape(title)),
        tag("desc", escape(summary)),
        *inner,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{title}. {summary}",
    )
    return tag("div", drawn, class_="scroll", tabindex=0, role="group", aria_label=title)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)
