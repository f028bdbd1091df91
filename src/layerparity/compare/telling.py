"""Telling: which site a close-up is of, and why it is not the one that fails, where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerparity.compare.comparison import Comparison
from layerparity.site import Site
from layerparity.verdict import Outcome, Row


@dataclass(frozen=True)
class Telling:
    """The ``site`` to show, None where no site of real numbers tells anything.

    ``place`` is the site that shows the fault, or the one shown; ``note`` is for the reader.
    """

    place: Site
    site: Site | None
    note: str = ""


def telling(comparison: Comparison, shown: Sequence[Row], asked: str) -> Telling | None:
    """Return what a close-up should show, None where there is nothing.

    ``shown`` are the rows that one can be made of, ``asked`` the site that shows the fault. The
    guilty block is not left: what is right elsewhere says nothing of it.
    """
    guilty = comparison.guilty.partition(" (")[0]
    if asked:
        return _of_site(shown, Site.parse(asked))
    if guilty:
        return _of_weights(shown, Site(guilty, "out"))
    failed = sorted(row.site for row in shown if row.outcome is Outcome.FAIL)
    if failed:
        return Telling(failed[0], failed[0])
    largest = max(shown, key=_error, default=None)
    return None if largest is None else Telling(largest.site, largest.site)


def _of_site(shown: Sequence[Row], asked: Site) -> Telling:
    """Return the site itself, else the one of its block that shows the most of what follows."""
    if any(row.site == asked for row in shown):
        return Telling(asked, asked)

    def weight(row: Row) -> tuple[bool, bool, float]:
        failed = row.outcome is Outcome.FAIL
        return failed and row.site.component == asked.component, failed, _rel_l2(row)

    site = _largest([r for r in _inside(shown, asked) if r.outcome is not Outcome.PASS], weight)
    cannot = f"{asked} shows the fault, and holds no real numbers to look at"
    if site is None:
        return Telling(asked, None, f"{cannot}; no site of real numbers in its block is off.")
    return Telling(asked, site, f"{cannot}: below is {site}, which is computed from it.")


def _of_weights(shown: Sequence[Row], guilty: Site) -> Telling:
    """Return the site of a place whose weights differ that has the largest error, though it passes.

    Without one of the very component it is one of its block.
    """

    def weight(row: Row) -> tuple[bool, tuple[float, float]]:
        return row.site.path == guilty.path, _error(row)

    site = _largest(_inside(shown, guilty), weight)
    words = f"No site fails: the weights of {guilty.path} are what is wrong"
    if site is None:
        return Telling(guilty, None, f"{words}, and no site of real numbers there can be shown.")
    return Telling(guilty, site, f"{words}. Below is the site with the largest error there.")


def _inside(shown: Sequence[Row], place: Site) -> list[Row]:
    """Return the rows of what a place's block, or stage outside them, computes in its step."""
    return [
        row
        for row in shown
        if row.site.layer == place.layer
        and (place.layer is not None or row.site.path == place.path)
        and (row.site.phase, row.site.step) == (place.phase, place.step)
        and row.site.local != ":in"
    ]


def _largest(rows: Sequence[Row], weight: Callable[[Row], tuple[object, ...]]) -> Site | None:

    ordered = sorted(rows, key=lambda row: row.site)
    found = max(ordered, key=weight, default=None)
    return None if found is None else found.site


def _rel_l2(row: Row) -> float:
    return row.metrics.get("rel_l2", 0.0)


def _error(row: Row) -> tuple[float, float]:
    return row.metrics.get("error_ratio", 0.0), _rel_l2(row)
