"""Conclude: from two sides' stored runs to one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerparity.anatomy.block import Block
from layerparity.anatomy.blocks import Blocks, by_layer
from layerparity.anatomy.site import Place, Site
from layerparity.judge.align import Alignment, Pair, align
from layerparity.judge.calibrate import Calibration
from layerparity.judge.coverage import doubt_block_outputs, whole_model
from layerparity.judge.decide import decide, outcome_of
from layerparity.judge.evaluate import Measured, measure
from layerparity.judge.evidence import evidence_of
from layerparity.judge.exercised import coverage_of, unseen_classes
from layerparity.judge.fingerprints import refuse_strangers, same_experiment
from layerparity.judge.guilty import Judged, first_guilty, guilty_in
from layerparity.judge.sides import RunSet, open_side
from layerparity.judge.tolerances.base import Tolerance
from layerparity.judge.weights import silent_sides, weight_findings
from layerparity.mistakes.catalogue import likeliest
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row, Verdict

Progress = Callable[[int, int, str], None]


def conclude(
    golden: Sequence[StoredRun],
    candidate: Sequence[StoredRun],
    tolerance: Tolerance,
    *,
    progress: Progress | None = None,
    settings: dict[str, Any] | None = None,
    unfinished: Sequence[str] = (),
    portrait: bool = False,
) -> Verdict:
    """Return the verdict on the union of some runs against the union of others.

    Either side holds runs, or folders of dumps, oldest first: where two hold one site the last
    counts. ``progress`` is called with (sites done, sites to do, site). ``settings`` are the keys
    of the command; ``unfinished`` names sweeps of the candidate that did not finish: what they lack
    is a doubt. ``portrait`` adds a portrait of the guilty site. Raises UserError where the runs
    cannot be compared, or the golden cannot be believed.
    """
    left, right = open_side("golden", golden), open_side("candidate", candidate)
    refuse_strangers(left, right)
    blocks = _blocks(left, right)
    aligned = align(left, right, blocks)
    calibration = Calibration(left, right)
    measured = _measure(aligned, (left, right), calibration, progress or _silent)
    rows = _rows(aligned, measured, tolerance)
    weights = weight_findings(left, right, blocks)
    coverage = coverage_of(rows, left, right)
    layers = max(each.model.num_layers for each in (*left.manifests, *right.manifests))
    verdict = Verdict(
        golden=left.describe(),
        candidate=right.describe(),
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        rows=rows,
        total=aligned.total,
        outcome=outcome_of(rows, weights, [*coverage.doubts, *unfinished]),
        whole=whole_model(rows, layers, unseen_classes(coverage)),
        weights=weights,
        silent=silent_sides(left, right),
        unfinished=tuple(unfinished),
        coverage=coverage,
        warnings=(*_warnings(left, right), *_narrow(tolerance, left, right)),
        token_errors={str(s): m.token_errors for s, m in measured.items() if m.token_errors},
        profiles=_profiles(rows, measured),
        settings=settings or {},
        blocks=blocks,
    )
    verdict = with_guilt(verdict, left)
    if portrait:
        from layerparity.judge.portraits import portrait_of

        verdict = replace(verdict, portrait=portrait_of(verdict, aligned, calibration))
    return verdict


def with_guilt(verdict: Verdict, golden: RunSet, stage: Place | None = None) -> Verdict:
    """Return a verdict that names the first wrong place and its likeliest causes, if any.

    With a ``stage``, a block or a module outside the blocks, it is the first one there.
    """
    judged = judged_of(verdict)
    guilty = first_guilty(judged) if stage is None else guilty_in(judged, stage)
    if guilty is None:
        return replace(verdict, guilty=None, causes=())
    causes = likeliest(evidence_of(guilty, verdict, golden))
    return replace(verdict, guilty=guilty, causes=tuple(causes))


def portrayed(
    verdict: Verdict, golden: Sequence[StoredRun], candidate: Sequence[StoredRun]
) -> Verdict:
    """Return a verdict with a portrait of the guilty site, from the two sides' runs."""
    from layerparity.judge.portraits import portrait_of

    left, right = open_side("golden", golden), open_side("candidate", candidate)
    aligned = align(left, right, verdict.blocks)
    return replace(verdict, portrait=portrait_of(verdict, aligned, Calibration(left, right)))


def judged_of(verdict: Verdict) -> Judged:
    """Return what the first wrong place is looked for in."""
    chained = verdict.candidate.feed != "isolated"
    return Judged(verdict.rows, verdict.weights, verdict.blocks, chained)


def _blocks(golden: RunSet, candidate: RunSet) -> Blocks:
    """Return the structure of the model's blocks: the golden's measurement, else the other's."""
    measured: dict[int, Block] = {}
    for manifest in (*candidate.manifests, *golden.manifests):
        measured.update(by_layer(manifest.blocks))
    known = [each.model.model_type for each in (*golden.manifests, *candidate.manifests)]
    return Blocks.of(next((name for name in known if name), ""), measured)


def _measure(
    aligned: Alignment, sides: tuple[RunSet, RunSet], calibration: Calibration, progress: Progress
) -> dict[Site, Measured]:
    """Return what was measured of every pair of tensors, by site."""
    measured = {}
    for done, pair in enumerate(aligned.pairs):
        progress(done, len(aligned.pairs), str(pair.site))
        measured[pair.site] = measure(pair, *sides, calibration, aligned.blocks)
    progress(len(aligned.pairs), len(aligned.pairs), "")
    return measured


def _rows(
    aligned: Alignment, measured: Mapping[Site, Measured], tolerance: Tolerance
) -> tuple[Row, ...]:
    """Return a row for every site that was asked for, in the order of a forward pass."""
    judged = [_row(pair, measured[pair.site], tolerance) for pair in aligned.pairs]
    rows = sorted([*aligned.settled, *judged], key=lambda row: aligned.blocks.order(row.site))
    return tuple(doubt_block_outputs(rows, aligned.blocks))


def _row(pair: Pair, measured: Measured, tolerance: Tolerance) -> Row:
    if measured.nothing:
        return Row(pair.site, pair.kind, Outcome.INCONCLUSIVE, note=measured.nothing)
    outcome, breaches, note = decide(pair.kind, measured.metrics, tolerance, measured.lacking)
    return Row(pair.site, pair.kind, outcome, breaches, note, measured.metrics)


def _profiles(
    rows: Sequence[Row], measured: Mapping[Site, Measured]
) -> dict[str, dict[str, list[float]]]:
    """Return what the groups of each failed site deviate by."""
    failed = [row.site for row in rows if row.outcome is Outcome.FAIL and row.site in measured]
    return {str(site): measured[site].profiles for site in failed if measured[site].profiles}


def _silent(done: int, total: int, site: str) -> None:
    """Show no progress."""


def _narrow(tolerance: Tolerance, left: RunSet, right: RunSet) -> list[str]:
    dtypes = {each.dtype for each in (*left.manifests, *right.manifests)}
    if tolerance.name != "fixed" or not dtypes & {"bfloat16", "float16"}:
        return []
    return [
        "The fixed tolerance does not know how far 16-bit rounding goes: it may fail a correct run."
    ]


def _warnings(left: RunSet, right: RunSet) -> list[str]:
    warnings = [*left.warnings, *right.warnings, *same_experiment(left, right)]
    for role, side in (("golden", left), ("candidate", right)):
        if not side.proved:
            warnings.append(
                f"The {role} is a dump without fingerprints: nothing proves that both were fed the "
                "same inputs and had the same weights."
            )
        if any(manifest.synthetic for manifest in side.manifests):
            warnings.append(f"The {role}'s inputs are synthetic: real ones may show other errors.")
    return warnings
