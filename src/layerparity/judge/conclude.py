"""Conclude: turn two sides' stored runs into one verdict, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerparity.anatomy.block import Block
from layerparity.anatomy.blocks import Blocks, by_layer
from layerparity.anatomy.site import PREFILL, Place, Site
from layerparity.judge.align import Alignment, align
from layerparity.judge.calibrate import Calibration
from layerparity.judge.coverage import (
    doubt_block_outputs,
    exercised,
    judged_coverage,
    whole_model,
)
from layerparity.judge.decide import decide, outcome_of
from layerparity.judge.decode_steps import by_steps, measure_steps
from layerparity.judge.evaluate import Measured
from layerparity.judge.evidence import evidence_of
from layerparity.judge.fingerprints import refuse_strangers, same_experiment
from layerparity.judge.folded import with_folded_scales
from layerparity.judge.guilty import guilty_in, guilty_places, judged_of
from layerparity.judge.no_residual import without_residual
from layerparity.judge.probes import probe_cautions
from layerparity.judge.ranks import makers_of, replica_metric, with_ranks
from layerparity.judge.routing import skip_ties
from layerparity.judge.sides import RunSet, open_sides
from layerparity.judge.tolerances.base import Tolerance
from layerparity.judge.weights import moved_by, silent_sides, weight_findings
from layerparity.mistakes.catalogue import likeliest
from layerparity.mistakes.replayed import Replays
from layerparity.mistakes.ruled_out import ruled_out
from layerparity.numbers.closeness import Closeness
from layerparity.numbers.operands import ACTIVATIONS
from layerparity.record.findings import Caution, CautionKind, UnfinishedSweep
from layerparity.record.manifest import ORIGINAL
from layerparity.record.stored_run import StoredRun, is_transformers
from layerparity.record.verdict import Outcome, Row, Verdict

Progress = Callable[[int, int, str], None]
# The candidate's error against the reference over the golden's own, above which it is noisier.
NOISIER = 1.2
# So many times a golden's own error rounded operands make, where they show; and what is no more of
# it than chance makes.
_COARSE, _AS_NEAR = 3.0, 1.5
_SHORT = {"bfloat16", "float16"}


def conclude(
    golden: Sequence[StoredRun],
    candidate: Sequence[StoredRun],
    tolerance: Tolerance,
    *,
    progress: Progress | None = None,
    settings: dict[str, Any] | None = None,
    unfinished: Sequence[UnfinishedSweep] = (),
    portrait: bool = False,
    replays: Replays | None = None,
) -> Verdict:
    """Return the verdict on the union of some runs against the union of others.

    Either side holds runs, or folders of dumps, oldest first: where two hold one site the last
    counts. ``progress`` is called with (sites done, sites to do, site). ``settings`` are the keys
    of the command; ``unfinished`` names sweeps of the candidate that did not finish: what they lack
    is a doubt. ``portrait`` adds a portrait of the guilty site. ``replays`` computes the golden's
    guilty block again with known mistakes. Raises UserError where the runs
    cannot be compared, or the golden cannot be believed.
    """
    left, right, aligned = paired(golden, candidate)
    calibration = Calibration(left, right, aligned.blocks)
    reports = progress or (lambda *_: None)
    measured = _evaluate(aligned, left, right, calibration, reports, close=tolerance.closeness)
    rows = _decide(aligned, measured, tolerance, right)
    rows = tuple(without_residual(rows, left, right, aligned.blocks))
    rows = tuple(with_folded_scales(rows, aligned))
    verdict = _verdict_of(
        rows, measured, aligned.blocks, (left, right), tolerance, unfinished=unfinished
    )
    verdict = replace(verdict, total=aligned.total, settings=settings or {})
    verdict = with_guilt(verdict, left, candidate=right, replays=replays)
    return _with_portrait(verdict, aligned, calibration) if portrait else verdict


def paired(
    golden: Sequence[StoredRun], candidate: Sequence[StoredRun]
) -> tuple[RunSet, RunSet, Alignment]:
    """Return both sides, and what is compared with what; no tensor is read.

    Raises UserError where the runs cannot be compared.
    """
    left, right = open_sides(golden, candidate)
    refuse_strangers(left, right)
    return left, right, align(left, right, _structure(left, right))


def _verdict_of(
    rows: tuple[Row, ...],
    measured: Mapping[Site, Measured],
    blocks: Blocks,
    sides: tuple[RunSet, RunSet],
    tolerance: Tolerance,
    *,
    unfinished: Sequence[UnfinishedSweep],
) -> Verdict:
    """Return what the rows, the weights and the coverage of two sides amount to, without guilt."""
    left, right = sides
    weights = weight_findings(left, right, blocks)
    coverage = judged_coverage(exercised(rows, left, right), rows)
    outcome = outcome_of(rows, weights, [*coverage.doubts, *unfinished])
    layers, unseen = max(left.num_layers, right.num_layers), [each.name for each in coverage.unseen]
    failed = [row.site for row in rows if row.outcome is Outcome.FAIL and row.metrics]
    return Verdict(
        golden=left.describe(),
        candidate=right.describe(),
        tolerance=tolerance.name,
        limits=tolerance.limits(),
        knows_chains=tolerance.knows_chains,
        closeness=tolerance.closeness,
        rows=rows,
        total=len(rows),
        outcome=outcome,
        whole=whole_model(rows, layers, outcome, unseen),
        weights=weights,
        silent=silent_sides(left, right),
        unfinished=tuple(unfinished),
        coverage=coverage,
        cautions=_cautions(rows, left, right, blocks, tolerance),
        token_errors={str(s): m.token_errors for s, m in measured.items() if m.token_errors},
        profiles={str(s): measured[s].groups for s in failed if measured[s].profiles},
        blocks=blocks,
    )


def _structure(golden: RunSet, candidate: RunSet) -> Blocks:
    """Return the structure of the model's blocks: the golden's measurement, else the other's."""
    measured: dict[int, Block] = {}
    for manifest in (*candidate.manifests, *golden.manifests):
        measured.update(by_layer(manifest.blocks))
    types = [each.model.model_type for each in (*golden.manifests, *candidate.manifests)]
    return Blocks.of(next((name for name in types if name), ""), measured)


def _evaluate(
    aligned: Alignment,
    golden: RunSet,
    candidate: RunSet,
    calibration: Calibration,
    progress: Progress,
    *,
    close: Closeness,
) -> dict[Site, Measured]:
    """Return what was measured of every pair of tensors, by site; few are held at a time."""
    measured: dict[Site, Measured] = {}
    for group in by_steps(aligned.pairs, calibration):
        progress(len(measured), len(aligned.pairs), str(group[0].site))
        measured |= measure_steps(
            group, golden, candidate, calibration, aligned.blocks, close=close
        )
    progress(len(aligned.pairs), len(aligned.pairs), "")
    return {pair.site: measured[pair.site] for pair in aligned.pairs}


def _decide(
    aligned: Alignment, measured: Mapping[Site, Measured], tolerance: Tolerance, candidate: RunSet
) -> tuple[Row, ...]:
    """Return a row for every site that was asked for, in the order of a forward pass."""
    rows = list(aligned.settled)
    for pair in aligned.pairs:
        of_site = measured[pair.site]
        if of_site.nothing:
            row = Row(pair.site, pair.kind, Outcome.INCONCLUSIVE, why=of_site.nothing)
        else:
            metrics = {**of_site.metrics, **replica_metric(candidate, pair.site)}
            outcome, breaches, why = decide(pair.kind, metrics, tolerance, of_site.lacking)
            row = Row(pair.site, pair.kind, outcome, breaches, why, metrics, of_site.lacking)
        rows.append(row)
    rows.sort(key=lambda row: aligned.blocks.order(row.site))
    return tuple(doubt_block_outputs(skip_ties(rows), aligned.blocks))


def _cautions(
    rows: Sequence[Row], golden: RunSet, candidate: RunSet, blocks: Blocks, tolerance: Tolerance
) -> tuple[Caution, ...]:
    """Return what a reader should know of the two sides, of their rows, and of what judges them."""
    sides = (("golden", golden), ("candidate", candidate))
    cautions = [replace(each, side=role) for role, side in sides for each in side.cautions]
    if any(manifest.values_of for manifest in golden.manifests):
        cautions.append(Caution(CautionKind.OWN_VALUES, "candidate"))
    other = [each.port for each in golden.manifests if not is_transformers(each.port)]
    if golden.proved and other and other[0]:
        cautions.append(Caution(CautionKind.GOLDEN_OF_A_PORT, values={"port": other[0]}))
    rounded = {each.computed.operands for each in candidate.manifests} - {()}
    for operands in sorted(rounded):
        words = {ACTIVATIONS: "what config.json says of activations"}
        values = {"operands": " and ".join(words.get(each, each) for each in operands)}
        cautions.append(Caution(CautionKind.ROUNDED_OPERANDS, "candidate", values))
    original = {m.numerics[ORIGINAL] for m in golden.manifests if ORIGINAL in m.numerics}
    if original:
        said = {"original": min(original), "moved": 100 * moved_by(golden)}
        cautions.append(Caution(CautionKind.ORIGINAL_WEIGHTS, "golden", said))
    cautions += same_experiment(golden, candidate)
    for role, side in sides:
        if not side.proved:
            cautions.append(Caution(CautionKind.NO_FINGERPRINTS, role))
        if any(manifest.synthetic for manifest in side.manifests):
            cautions.append(Caution(CautionKind.SYNTHETIC_INPUTS, role))
    cautions += rounding_cautions(tolerance, (*golden.dtypes, *candidate.dtypes))
    cautions += probe_cautions(golden, candidate, blocks)
    # Other weights, and rounded operands, are further off than any sum.
    if rounded:
        cautions += not_rounded(rows)
    elif not original:
        cautions += noisier(rows, golden.dtypes, candidate.dtypes)
    return tuple(cautions)


def rounding_cautions(tolerance: Tolerance, dtypes: Iterable[str]) -> list[Caution]:
    """Return a caution where a tolerance that knows no rounding judges what 16 bits compute."""
    if tolerance.knows_rounding or _SHORT.isdisjoint(dtypes):
        return []
    return [Caution(CautionKind.ROUNDING_UNKNOWN, values={"tolerance": tolerance.name})]


def noisier(rows: Sequence[Row], golden: Iterable[str], candidate: Iterable[str]) -> list[Caution]:
    """Return a caution that names the first class of sites at which a candidate is noisier.

    It is where its error against the reference is `NOISIER` times the golden's in every block. No
    site fails by that: sums in several parts are right, and noisier. ``rows`` stand in the order of
    a forward pass; ``golden`` and ``candidate`` are both sides' dtypes, of which only equal ones
    are compared.
    """
    if set(golden) != set(candidate):
        return []
    ratios: dict[str, list[float]] = {}
    # What fails is no noise.
    failed = {row.site.local for row in rows if row.outcome is Outcome.FAIL}
    for row in rows:
        own = row.metrics.get("golden_error_ratio") if row.site.local not in failed else None
        if own and row.site.layer is not None and row.site.phase == PREFILL:
            ratios.setdefault(row.site.local, []).append(row.metrics["error_ratio"] / own)
    for local, each in ratios.items():
        # Of one block alone, nothing holds everywhere.
        if len(each) > 1 and min(each) > NOISIER:
            values = {"site": local, "blocks": len(each), "times": min(each)}
            return [Caution(CautionKind.NOISIER, "candidate", values)]
    return []


def not_rounded(rows: Sequence[Row]) -> list[Caution]:
    """Return a caution where a candidate rounds no operands, though it is said to.

    Of the sites at which that is `_COARSE` times as noisy as the golden, it is as near to the
    reference as the golden itself at most: at others something else may be wrong. ``rows`` stand in
    the order of a forward pass.
    """
    found = [
        (row.site, row.metrics["error_ratio"] / own)
        for row in rows
        if (own := row.metrics.get("golden_error_ratio")) and own < 1 / _COARSE
    ]
    near = [site for site, times in found if times <= _AS_NEAR]
    if 2 * len(near) <= len(found):
        return []
    values = {"site": str(near[0]), "count": len(near), "total": len(found)}
    return [Caution(CautionKind.NOT_ROUNDED, "candidate", values)]


def with_guilt(
    verdict: Verdict,
    golden: RunSet,
    stage: Place | None = None,
    *,
    candidate: RunSet | None = None,
    replays: Replays | None = None,
) -> Verdict:
    """Return a verdict that names the first wrong place and its likeliest causes, if any.

    With a ``stage``, a block or a module outside the blocks, it is the first one there. With the
    ``candidate``'s runs causes are tried on their tensors, with ``replays`` also on the golden's
    block.
    """
    verdict = with_places(verdict, stage)
    guilty = verdict.guilty
    if guilty is not None and candidate is not None:
        guilty = with_ranks(guilty, golden, candidate)
        verdict = replace(verdict, guilty=guilty)
    found = evidence_of(guilty, verdict, golden, candidate) if guilty is not None else None
    if found is not None and guilty is not None and candidate is not None and replays is not None:
        from layerparity.judge.replays import with_replays

        found = with_replays(found, guilty, (golden, candidate), verdict.blocks, replays)
    causes = likeliest(found) if found is not None else []
    if found is not None and guilty is not None:
        made = found.replayed.ranks(guilty.degree)
        # Of two replicas that disagree, either rank's may be the odd one.
        told = made if made and set(made) < set(guilty.ranks) else guilty.ranks or made
        makers = told or makers_of(causes, guilty.degree)
        verdict = replace(verdict, guilty=replace(guilty, ranks=makers))
    # What does not fit is told where nothing does.
    tried = ruled_out(found) if found is not None and not causes else ()
    return replace(verdict, causes=tuple(causes), ruled_out=tried)


def with_places(verdict: Verdict, stage: Place | None = None) -> Verdict:
    """Return a verdict that names the first wrong place, of a ``stage`` if one is given; and more.

    What else goes wrong by itself, outside that place's stage, is ``further``.
    """
    judged = judged_of(verdict)
    places = guilty_places(judged)
    guilty = next(iter(places), None) if stage is None else guilty_in(judged, stage)
    named = guilty.place.stage if guilty is not None else ""
    further = tuple(each for each in places if each.place.stage != named)
    return replace(verdict, guilty=guilty, further=further)


def portrayed(
    verdict: Verdict, golden: Sequence[StoredRun], candidate: Sequence[StoredRun]
) -> Verdict:
    """Return a verdict with a portrait of the guilty site, from the two sides' runs."""
    left, right = open_sides(golden, candidate)
    aligned = align(left, right, verdict.blocks)
    return _with_portrait(verdict, aligned, Calibration(left, right, verdict.blocks))


def _with_portrait(verdict: Verdict, aligned: Alignment, calibration: Calibration) -> Verdict:
    from layerparity.judge.portraits import portrait_of

    return replace(verdict, portrait=portrait_of(verdict, aligned, calibration))
