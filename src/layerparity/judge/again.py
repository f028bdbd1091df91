"""Again: judge a stored verdict by another tolerance, from its numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.judge.conclude import judged_of, rounding_cautions, with_guilt
from layerparity.judge.coverage import doubt_block_outputs, judged_coverage, whole_model
from layerparity.judge.decide import decide, outcome_of
from layerparity.judge.guilty import first_guilty
from layerparity.judge.sides import open_side
from layerparity.judge.tolerances.base import Tolerance
from layerparity.record.findings import CautionKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import COMPARE_AGAIN, FILE_NAME, Outcome, Row, Verdict


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
) -> Verdict:
    """Return a verdict on the same numbers by another tolerance.

    Rows that were settled without numbers stay as they are. What they leave in doubt follows from
    them, as in the first judgement. Causes want the runs of the ``golden``;
    without them none is named. The portrait stays where it shows the same site.
    """
    rows = list(verdict.rows)
    for index, row in enumerate(verdict.rows):
        if row.metrics and row.outcome not in (Outcome.MISSING, Outcome.SKIPPED):
            outcome, breaches, why = decide(row.kind, row.metrics, tolerance, row.lacking)
            rows[index] = replace(row, outcome=outcome, breaches=breaches, why=why)
    rows = doubt_block_outputs(rows, verdict.blocks)
    coverage = judged_coverage(verdict.coverage, rows)
    unseen = [each.name for each in coverage.unseen]
    kept = [each for each in verdict.cautions if each.kind is not CautionKind.ROUNDING_UNKNOWN]
    dtypes = (*verdict.golden.dtypes, *verdict.candidate.dtypes)
    again = replace(
        verdict,
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        knows_chains=tolerance.knows_chains,
        rows=tuple(rows),
        outcome=outcome_of(rows, verdict.weights, [*coverage.doubts, *verdict.unfinished]),
        whole=whole_model(rows, verdict.whole.blocks, unseen),
        coverage=coverage,
        cautions=(*kept, *rounding_cautions(tolerance, dtypes)),
        settings=verdict.settings if settings is None else settings,
    )
    if golden:
        return with_guilt(again, open_side("golden", golden))
    return replace(again, guilty=first_guilty(judged_of(again)), causes=(), ruled_out=())


def changed_rows(before: Verdict, after: Verdict) -> list[tuple[Row, Row]]:
    """Return the rows, before and after, of the sites that end otherwise."""
    new = {row.site: row for row in after.rows}
    pairs = ((row, new[row.site]) for row in before.rows)
    return [(old, row) for old, row in pairs if old.outcome is not row.outcome]
