"""Figure: head, channel or expert x layer, each group's error at the guilty class of site."""

from __future__ import annotations

from layerparity.compare.portrait import FLOOR, Portrait
from layerparity.compare.report.columns import Columns
from layerparity.compare.report.heat_grid import Bins, Said, heat_grid
from layerparity.compare.report.stages import called
from layerparity.site import Site

GROUPS = ("head", "channel", "expert")
# A group that is so many noise floors off is no rounding; of its own size, nor is the whole of it.
_WRONG = 100.0


def group_heatmap(columns: Columns, portrait: Portrait, group: str) -> str:
    """Return the figure as markup, or an empty string where the site has no such groups."""
    found = portrait.groups.get(group)
    if found is None:
        return ""
    by_column = [
        next((found.values[str(r.site)] for r in stage.rows if str(r.site) in found.values), [])
        for stage in columns.stages
    ]
    bins = Bins(max((len(each) for each in by_column), default=0), group, found.size, found.count)
    if not bins.tokens:
        return ""
    calibrated = portrait.unit == FLOOR
    said = Said(
        f"Error of each {group} by layer, at the {called(Site.parse(portrait.site).local)}",
        f"{found.count} {group}s downwards, {len(columns.stages)} layers and modules across.",
        "R" if calibrated else "rel L2",
    )
    return heat_grid(columns, by_column, bins, said, _WRONG if calibrated else 1.0)


def per_row(portrait: Portrait, group: str) -> int:
    """Return how many groups one row of the figure holds (the largest of theirs is shown)."""
    found = portrait.groups[group]
    longest = max(len(each) for each in found.values.values())
    return Bins(longest, group, found.size).per_row
