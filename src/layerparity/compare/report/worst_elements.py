"""The elements that are farthest off, as lines of a table: where, both values, the reference."""

from __future__ import annotations

from layerparity.compare.portrait import FLOOR, Element, Portrait
from layerparity.compare.report.measure import numeral


def worst_header(portrait: Portrait) -> list[str]:
    """Return the titles of the columns."""
    batch = ["sequence"] if _many(portrait) else []
    right = ["reference"] if _referred(portrait) else []
    off = "noise floors off" if portrait.unit == FLOOR else "off by"
    return [*batch, "token", "element", "golden", "candidate", *right, off]


def worst_rows(portrait: Portrait) -> list[list[str]]:
    """Return a line for each element, the worst first."""
    return [_line(each, portrait) for each in portrait.worst]


def _line(each: Element, portrait: Portrait) -> list[str]:
    batch = [str(each.sequence)] if _many(portrait) else []
    values = [each.golden, each.candidate]
    if _referred(portrait) and each.reference is not None:
        values.append(each.reference)
    shown = [f"{value:.8g}".replace("-", "−") for value in values]
    return [*batch, str(each.token), each.place, *shown, numeral(each.error)]


def _many(portrait: Portrait) -> bool:
    return any(each.sequence for each in portrait.worst)


def _referred(portrait: Portrait) -> bool:
    return any(each.reference is not None for each in portrait.worst)
