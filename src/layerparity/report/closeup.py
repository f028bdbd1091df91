"""Say in words what the close-up of the guilty place shows, and its worst elements."""

from __future__ import annotations

from layerparity.ground.numeral import numeral, precise
from layerparity.record.portrait import FLOOR, InsteadKind, Portrait

_UNREAL = "{place} shows the fault, and holds no real numbers to look at"
_BY_WEIGHTS = "The weights of {place} are what is wrong: no site of it shows that by itself"
# With the place, and the site that is shown, in their places.
_INSTEAD = {
    InsteadKind.FOLLOWING: f"{_UNREAL}: below is {{site}}, which is computed from it.",
    InsteadKind.NOTHING_OFF: f"{_UNREAL}; no site of real numbers in its block is off.",
    InsteadKind.LARGEST_ERROR: f"{_BY_WEIGHTS}. Below is the site with the largest error there.",
    InsteadKind.NO_ERROR: f"{_BY_WEIGHTS}, and no site of real numbers there can be shown.",
}


def instead_text(portrait: Portrait) -> str:
    """Return why another site is shown than one that fails; empty where it is that one."""
    instead = portrait.instead
    if instead is None:
        return ""
    return _INSTEAD[instead.kind].format(place=instead.place, site=portrait.site)


def worst_header(portrait: Portrait) -> list[str]:
    """Return the titles of the columns."""
    batch = ["sequence"] if _many(portrait) else []
    referred = any(each.reference is not None for each in portrait.worst)
    right = ["reference"] if referred else []
    off = "noise floors off" if portrait.unit == FLOOR else "off by"
    return [*batch, "token", "element", "golden", "candidate", *right, off]


def worst_rows(portrait: Portrait) -> list[list[str]]:
    """Return a line for each element, the worst first."""
    rows = []
    for each in portrait.worst:
        batch = [str(each.sequence)] if _many(portrait) else []
        values = [each.golden, each.candidate]
        values += [] if each.reference is None else [each.reference]
        numbers = [precise(value) for value in values]
        place = f"channel {each.channel}"
        place = place if each.head is None else f"head {each.head}, {place}"
        rows.append([*batch, str(each.token), place, *numbers, numeral(each.error)])
    return rows


def _many(portrait: Portrait) -> bool:
    return any(each.sequence for each in portrait.worst)
