"""Parity: compare two sides, from stored runs to a `Comparison`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerparity.anatomy.site import Kind
from layerparity.ground.errors import UserError
from layerparity.judge.align import Pair, Plan, plan
from layerparity.judge.calibrate import Calibration
from layerparity.judge.coverage import doubt_block_outputs, whole_model
from layerparity.judge.dumps import open_dump
from layerparity.judge.evaluate import Measured, measure
from layerparity.judge.exercised import with_coverage
from layerparity.judge.fingerprints import refuse_strangers, refuse_unfinished, same_experiment
from layerparity.judge.judge import judge
from layerparity.judge.sides import Union
from layerparity.judge.tolerances.base import Tolerance
from layerparity.judge.weights import with_weights
from layerparity.record.comparison import Comparison
from layerparity.record.source import RunSource, Source
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row, sum_up

Progress = Callable[[int, int, str], None]


def compare_runs(
    golden: Sequence[StoredRun],
    candidate: Sequence[StoredRun],
    tolerance: Tolerance,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the union of some runs with the union of others.

    Either side holds runs, or folders of dumps, oldest first: where two hold one site the last
    counts. ``progress`` is called with (sites done, sites to do, site). Raises UserError where the
    runs cannot be compared, or the golden cannot be believed.
    """
    left, right = open_side("golden", golden), open_side("candidate", candidate)
    refuse_strangers(left, right)
    planned = plan(left, right)
    comparison = _evaluate(planned, left, right, tolerance, progress)
    comparison.warnings[:0] = [*_warnings(left, right), *_narrow(tolerance, left, right)]
    return with_coverage(with_weights(comparison, left, right), left, right)


def open_side(role: str, runs: Sequence[StoredRun]) -> Union:
    """Open the runs of one side. Raises UserError for none, or one that is not finished."""
    if not runs:
        raise UserError(f"There is no {role} run to compare: make one, or give {role}=<run>.")
    for run in runs:
        refuse_unfinished(run)
    return Union([_open(run) for run in runs])


def _open(run: StoredRun) -> Source:
    return RunSource(run) if run.files.is_run else open_dump(run)


def _evaluate(
    planned: Plan, left: Union, right: Union, tolerance: Tolerance, progress: Progress | None
) -> Comparison:
    rows, token_errors, profiles = list(planned.settled), {}, {}
    calibration = Calibration(left, right)
    for done, pair in enumerate(planned.pairs):
        if progress:
            progress(done, len(planned.pairs), str(pair.site))
        measured = measure(pair, left, right, calibration)
        row = _row(pair, measured, tolerance)
        rows.append(row)
        if row.outcome is Outcome.FAIL and measured.profiles:
            profiles[str(pair.site)] = measured.profiles
        if measured.token_errors:
            token_errors[str(pair.site)] = measured.token_errors
    if progress:
        progress(len(planned.pairs), len(planned.pairs), "")
    rows = doubt_block_outputs(sorted(rows, key=lambda row: row.site))
    layers = max(each.model.num_layers for each in (*left.manifests, *right.manifests))
    return Comparison(
        golden=left.describe(),
        candidate=right.describe(),
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        rows=rows,
        verdict=sum_up(rows, planned.total, whole_model(rows, layers)),
        token_errors=token_errors,
        profiles=profiles,
    )


def _row(pair: Pair, measured: Measured, tolerance: Tolerance) -> Row:
    if measured.nothing:
        return Row(pair.site, pair.kind, Outcome.INCONCLUSIVE, measured.nothing)
    outcome, reason = judge(pair.kind, measured.metrics, tolerance, measured.lacking)
    if pair.kind is Kind.EXACT and outcome is Outcome.FAIL:
        reason = f"an exact site: {reason}"
    return Row(pair.site, pair.kind, outcome, reason, measured.metrics)


def _narrow(tolerance: Tolerance, left: Union, right: Union) -> list[str]:
    dtypes = {each.dtype for each in (*left.manifests, *right.manifests)}
    if tolerance.name != "fixed" or not dtypes & {"bfloat16", "float16"}:
        return []
    return [
        "The fixed tolerance does not know how far 16-bit rounding goes: it may fail a correct run."
    ]


def _warnings(left: Union, right: Union) -> list[str]:
    found = [*left.warnings, *right.warnings, *same_experiment(left, right)]
    for role, side in (("golden", left), ("candidate", right)):
        if not side.proved:
            found.append(
                f"The {role} is a dump without fingerprints: nothing proves that both were fed the "
                "same inputs and had the same weights."
            )
        if any(manifest.synthetic for manifest in side.manifests):
            found.append(f"The {role}'s inputs are synthetic: real ones may show other errors.")
    return found
