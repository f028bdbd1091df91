"""Figure: token x layer, the relative L2 error of every token at one class of site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerparity.compare.report.columns import Columns
from layerparity.compare.report.heat_grid import Bins, Said, heat_grid
from layerparity.compare.report.stages import called

TokenErrors = Mapping[str, Sequence[float]]


def errors_by_column(columns: Columns, token_errors: TokenErrors, local: str) -> list[list[float]]:
    """Return each column's token errors at one class of site, decode steps after the prefill.

    Outside the blocks every site counts as ``:out``: the map of the blocks' output is whole.
    """
    found = []
    for stage in columns.stages:
        tokens: list[float] = []
        for row in stage.rows:
            here = ":out" if stage.layer is None else row.site.local
            if here == local:
                tokens.extend(token_errors.get(str(row.site), ()))
        found.append(tokens)
    return found


def token_heatmap(columns: Columns, token_errors: TokenErrors, local: str) -> str:
    """Return the figure of a class of site as markup, or an empty string if it has no errors."""
    by_column = errors_by_column(columns, token_errors, local)
    bins = Bins(max((len(tokens) for tokens in by_column), default=0))
    if not bins.tokens:
        return ""
    said = Said(
        f"Error of each token by layer, at the {called(local)}",
        f"{bins.tokens} tokens downwards, {len(columns.stages)} layers and modules across.",
        "rel L2",
    )
    return heat_grid(columns, by_column, bins, said, 1.0)


def binning(columns: Columns, token_errors: TokenErrors, local: str) -> int:
    """Return how many tokens one row of the figure holds (their largest error is shown)."""
    by_column = errors_by_column(columns, token_errors, local)
    return Bins(max((len(tokens) for tokens in by_column), default=0)).size
