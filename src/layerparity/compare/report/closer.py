"""What the page shows of the guilty site and of the experts, made ready for its template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerparity.compare.comparison import Comparison
from layerparity.compare.portrait import FLOOR, Portrait
from layerparity.compare.report.columns import Columns
from layerparity.compare.report.distributions import quantile_plot, ulp_histogram
from layerparity.compare.report.expert_load import experts_per_row, load_panels, load_text
from layerparity.compare.report.experts import (
    agreement_by_layer,
    agreement_text,
    load_figure,
    load_site,
)
from layerparity.compare.report.group_heatmap import GROUPS, group_heatmap, per_row
from layerparity.compare.report.noise_by_layer import accumulated_error, local_error
from layerparity.compare.report.worst_elements import worst_header, worst_rows
from layerparity.site import Site
from layerparity.verdict import Outcome


@dataclass(frozen=True)
class GroupMap:
    """A group x layer figure, and how many groups one of its rows holds."""

    group: str
    figure: str
    per_row: int


def noise(columns: Columns, comparison: Comparison, fallback: str) -> dict[str, Any]:
    """Return the two figures of error against rounding; ``fallback`` is a site where none is known.

    The first is about the class of site that the portrait shows.
    """
    shown = comparison.portrait
    site = Site.parse(shown.site) if shown and shown.ulp else None
    local = site.local if site and site.layer is not None else fallback
    return {
        "local_site": local,
        "local": local_error(columns, comparison, local) if local else "",
        "accumulated": accumulated_error(columns, comparison),
    }


def portrait(columns: Columns, comparison: Comparison) -> dict[str, Any] | None:
    """Return what the page shows of the portrait, or None where there is none."""
    shown = comparison.portrait
    if shown is None:
        return None
    maps = [
        GroupMap(group, figure, per_row(shown, group))
        for group in GROUPS
        if (figure := group_heatmap(columns, shown, group))
    ]
    return {
        "site": shown.site,
        "title": _title(comparison, shown),
        "note": shown.note,
        "calibrated": shown.unit == FLOOR,
        "both_sides": "golden" in shown.ulp,
        "distributions": [each for each in _distributions(shown) if each[2]],
        "header": worst_header(shown),
        "rows": worst_rows(shown),
        "maps": maps,
    }


def _title(comparison: Comparison, shown: Portrait) -> str:
    failed = any(r.outcome is Outcome.FAIL and str(r.site) == shown.site for r in comparison.rows)
    if failed:
        return "The guilty site"
    if shown.note:
        return "The guilty place"
    return "The site with the largest R" if shown.unit == FLOOR else "The site of the largest error"


def experts(columns: Columns, comparison: Comparison) -> dict[str, Any]:
    """Return what the page says and draws of the experts; the text is empty where none routes."""
    site = load_site(comparison)
    loads = comparison.portrait.load if comparison.portrait else {}
    load = loads[site] if site else {}
    return {
        "panels": load_panels(loads),
        "panels_text": load_text(loads),
        "per_row": experts_per_row(loads),
        "text": agreement_text(columns),
        "agreement": agreement_by_layer(columns),
        "load": load_figure(load) if load else "",
        "load_site": site,
    }


def _distributions(shown: Portrait) -> list[tuple[str, str, str]]:
    believed = "reference" if shown.unit == FLOOR else "golden"
    return [
        (
            "Errors in ULP",
            f"Distance from the {believed}, in representable numbers of {shown.ulp_dtype}.",
            ulp_histogram(shown),
        ),
        (
            "Q-Q plot",
            "(side − reference) / floor against a normal. Rounding keeps near the dashed line.",
            quantile_plot(shown),
        ),
    ]
