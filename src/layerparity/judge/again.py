"""Again: judge a stored verdict by another tolerance, from its numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.judge.conclude import rounding_cautions, with_guilt, with_places
from layerparity.judge.coverage import doubt_block_outputs, judged_coverage, whole_model
from layerparity.judge.decide import decide, outcome_of
from layerparity.judge.routing import skip_ties
from layerparity.judge.sides import open_side, open_sides
from layerparity.judge.tolerances.base import Tolerance
from layerparity.mistakes.replayed import Replays
from layerparity.record.findings import CautionKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import COMPARE_AGAIN, FILE_NAME, Row, Verdict


def stored_verdict(run: StoredRun) -> Verdict:
    """Return the verdict that a comparison's run stored.

    Raises UserError where it is no comparison, is damaged or of another version.
    """
    path = run.file(FILE_NAME)
    if not path.is_file():
        raise UserError(
            f"Run '{run.name}' holds no {FILE_NAME}: give run= the id or name of a comparison made "
            "with this version, or compare again."
        )
    verdict = Verdict.read(path)
    run.refuse_altered(FILE_NAME, COMPARE_AGAIN)
    return verdict


def judge_again(
    verdict: Verdict,
    tolerance: Tolerance,
    golden: Sequence[StoredRun] = (),
    settings: dict[str, Any] | None = None,
    *,
    candidate: Sequence[StoredRun] = (),
    replays: Replays | None = None,
) -> Verdict:
    """Return a verdict on the same numbers by another tolerance.

    Rows that were settled without numbers stay as they are. What they leave in doubt follows from
    them, as in the first judgement. Causes want the runs of the ``golden``, without them none is
    named; those of the ``candidate``, to be tried on both sides' tensors; and ``replays``, to be
    tried on the golden's block. The portrait stays where it shows the same site. Raises UserError
    where the tolerance counts other elements as similar than the stored numbers do.
    """
    _refuse_other_closeness(verdict, tolerance)
    rows = list(verdict.rows)
    for index, row in enumerate(verdict.rows):
        if row.metrics:
            outcome, breaches, why = decide(row.kind, row.metrics, tolerance, row.lacking)
            rows[index] = replace(row, outcome=outcome, breaches=breaches, why=why)
    rows = doubt_block_outputs(skip_ties(rows), verdict.blocks)
    coverage = judged_coverage(verdict.coverage, rows)
    unseen = [each.name for each in coverage.unseen]
    outcome = outcome_of(rows, verdict.weights, [*coverage.doubts, *verdict.unfinished])
    kept = [each for each in verdict.cautions if each.kind is not CautionKind.ROUNDING_UNKNOWN]
    dtypes = (*verdict.golden.dtypes, *verdict.candidate.dtypes)
    again = replace(
        verdict,
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        knows_chains=tolerance.knows_chains,
        rows=tuple(rows),
        outcome=outcome,
        whole=whole_model(rows, verdict.whole.blocks, outcome, unseen),
        coverage=coverage,
        cautions=(*kept, *rounding_cautions(tolerance, dtypes)),
        settings=verdict.settings if settings is None else settings,
    )
    if golden:
        left, other = (
            open_sides(golden, candidate) if candidate else (open_side("golden", golden), None)
        )
        return with_guilt(again, left, candidate=other, replays=replays)
    return replace(with_places(again), causes=(), ruled_out=())


def _refuse_other_closeness(verdict: Verdict, tolerance: Tolerance) -> None:
    """Refuse a tolerance whose similar elements were not counted: that takes the tensors."""
    held, asked = verdict.closeness, tolerance.closeness
    if "similarity_percentage" in tolerance.limits() and held != asked:
        raise UserError(
            f"The stored numbers count elements as similar with rtol={held.rtol:g} "
            f"atol={held.atol:g}, not with rtol={asked.rtol:g} atol={asked.atol:g}: judge by "
            f"tolerance.rtol={held.rtol:g} tolerance.atol={held.atol:g}, or compare the runs again "
            "with other ones."
        )


def changed_rows(before: Verdict, after: Verdict) -> list[tuple[Row, Row]]:
    """Return the rows, before and after, of the sites that end otherwise."""
    new = {row.site: row for row in after.rows}
    pairs = ((row, new[row.site]) for row in before.rows)
    return [(old, row) for old, row in pairs if old.outcome is not row.outcome]
