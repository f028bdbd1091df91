"""Judge: from a site's metrics to how it ends; stored rows can be judged again without tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from layerparity.anatomy.site import Kind
from layerparity.judge.coverage import doubt_block_outputs, whole_model
from layerparity.judge.tolerances.base import Tolerance
from layerparity.judge.weights import failed_by
from layerparity.record.comparison import Comparison
from layerparity.record.verdict import Outcome, Row, open_to_doubt, sum_up

NO_REFERENCE = "nothing says how large its rounding may be"


def judge(
    kind: Kind, metrics: dict[str, float], tolerance: Tolerance, lacking: str = ""
) -> tuple[Outcome, str]:
    """Return how a site ends and why, given its metrics by name.

    ``lacking`` says why a tolerance may lack what it judges by: then the site is inconclusive.

    Exact sites and masks are judged by equality, NaN and Inf by agreement, whatever the tolerance.
    """
    if kind in (Kind.EXACT, Kind.MASK):
        broken = _apart(metrics["unequal"], "are not equal to the bit")
    else:
        disagreeing = metrics.get("nonfinite_disagreement", 0.0)
        broken = _apart(disagreeing, "are NaN or Inf on one side only")
        if not broken and tolerance.lacks(kind, metrics):
            return Outcome.INCONCLUSIVE, lacking or NO_REFERENCE
        broken = broken or tolerance.broken(kind, metrics)
    return (Outcome.FAIL, "; ".join(broken)) if broken else (Outcome.PASS, "")


def _apart(count: float, how: str) -> list[str]:
    return [f"{count:.0f} values {how}"] if count else []


# What a comparison says of a sweep that did not finish as a whole.
UNFINISHED = "what did not finish was not compared"
_OF_BLOCKS = re.compile(r"of (\d+) blocks")
_SETTLED = (Outcome.MISSING, Outcome.SKIPPED)


@dataclass(frozen=True)
class Change:
    """A site that ends otherwise than before."""

    before: Row
    after: Row


def rejudge(comparison: Comparison, tolerance: Tolerance) -> Comparison:
    """Return a comparison with the same numbers, judged by another tolerance.

    Rows that were settled without numbers stay as they are, and so does a doubt about the whole:
    a sweep that did not finish.
    """
    rows = doubt_block_outputs([_row(row, tolerance) for row in comparison.rows])
    whole = whole_model(rows, _blocks(comparison)) + _never_compared(comparison)
    verdict = failed_by(sum_up(rows, comparison.verdict.total, whole), comparison.weights)
    if comparison.coverage.doubts or _doubted(comparison):
        verdict = open_to_doubt(verdict)
    return replace(
        comparison,
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        rows=rows,
        verdict=verdict,
    )


def changes(before: Comparison, after: Comparison) -> list[Change]:
    """Return the sites whose outcome differs between two judgements of one comparison."""
    new = {row.site: row for row in after.rows}
    pairs = [(row, new[row.site]) for row in before.rows]
    return [Change(old, row) for old, row in pairs if old.outcome is not row.outcome]


def _row(row: Row, tolerance: Tolerance) -> Row:
    if row.outcome in _SETTLED or not row.metrics:
        return row
    outcome, reason = judge(row.kind, row.metrics, tolerance)
    if row.kind is Kind.EXACT and outcome is Outcome.FAIL:
        reason = f"an exact site: {reason}"
    return replace(row, outcome=outcome, reason=reason)


def _blocks(comparison: Comparison) -> int:
    """Return how many blocks the model has: the old verdict says so, unless all were compared."""
    said = _OF_BLOCKS.search(comparison.verdict.whole_model)
    layers = {row.site.layer for row in comparison.rows if row.site.layer is not None}
    return int(said[1]) if said else len(layers)


def _never_compared(comparison: Comparison) -> str:
    """Return what the verdict on the whole model says was never compared."""
    _, found, names = comparison.verdict.whole_model.partition("; never compared")
    return found + names


def _doubted(comparison: Comparison) -> bool:
    """Say whether the verdict was, or would have been, inconclusive for what no row says."""
    if any(UNFINISHED in warning for warning in comparison.warnings):
        return True
    verdict = comparison.verdict
    by_rows = sum_up(comparison.rows, verdict.total, verdict.whole_model)
    return verdict.outcome is Outcome.INCONCLUSIVE and by_rows.outcome is Outcome.PASS
