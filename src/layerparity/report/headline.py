"""The verdict of a comparison in words: headline, why, and the first divergence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from layerparity.record.comparison import Comparison, Side
from layerparity.record.findings import ExpertUse, WeightFinding
from layerparity.record.verdict import Outcome, Row
from layerparity.report.measures import REL_L2
from layerparity.report.stages import Stage, beside, called, first_to_fail, severity, stages

GLYPH = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✕",
    Outcome.INCONCLUSIVE: "?",
    Outcome.MISSING: "∅",
    Outcome.SKIPPED: "–",
}
_JUDGED = (Outcome.PASS, Outcome.FAIL)


def headline(comparison: Comparison) -> str:
    """Return ``PASS``, ``FAIL at <first failing site>`` or ``INCONCLUSIVE``."""
    verdict = comparison.verdict
    word = verdict.outcome.value.upper()
    return f"{word} at {verdict.first_failure}" if verdict.first_failure else word


def because(comparison: Comparison) -> str:
    """Return one or two sentences that say what the verdict rests on."""
    counts = comparison.verdict.counts
    judged = sum(counts.get(each.value, 0) for each in _JUDGED)
    if comparison.verdict.outcome is Outcome.FAIL:
        failed = counts.get(Outcome.FAIL.value, 0)
        verb = "fails" if failed == 1 else "fail"
        share = f"{failed} of the {_sites(judged)} judged"
        return f"{share} {verb} the {comparison.tolerance} tolerance."
    if comparison.verdict.outcome is Outcome.PASS:
        verb = "is" if judged == 1 else "are"
        within = f"All {_sites(judged)} judged {verb} within the {comparison.tolerance} tolerance."
        return f"{within} {_extent(comparison)}"
    if not judged:
        return "No site could be judged."
    open_ends = [
        f"{_sites(counts[each.value])} {each.value}"
        for each in (Outcome.MISSING, Outcome.INCONCLUSIVE)
        if counts.get(each.value)
    ]
    return f"Nothing judged fails, but this is no pass: {' and '.join(open_ends) or 'see below'}."


def whole_model(comparison: Comparison) -> str:
    """Return the verdict on the whole model, to stand beside a label that says so."""
    return comparison.verdict.whole_model.removeprefix("whole model: ") or "not judged"


def run_text(side: Side) -> str:
    """Return a side's run id; of a sweep's many, the first and how many more there are."""
    first, *more = side.run.split(",")
    return side.run if len(more) < 2 else f"{first} and {len(more)} more"


def feed_note(comparison: Comparison) -> str:
    """Say what later failures mean under the candidate's feed; empty where it is unknown."""
    return {
        "isolated": "Every block was fed the golden's own input, so an error is the block's own.",
        "chained": "Each block was fed by the block before it, so what follows the first "
        "failure may only be inherited.",
    }.get(comparison.candidate.feed, "")


def first_failure(comparison: Comparison) -> Row | None:
    """Return the first failing row in forward order, or None where nothing fails."""
    return first_to_fail(comparison.rows)


def largest_error(comparison: Comparison) -> Row | None:
    """Return the row with the largest relative L2 error, or None where there is no error at all."""
    measured = [row for row in comparison.rows if REL_L2.name in row.metrics and severity(row)]
    return max(measured, key=severity, default=None)


def stage_of(row: Row, comparison: Comparison) -> Stage:
    """Return the stage that a row of the comparison belongs to."""
    return next(stage for stage in stages(comparison.rows) if row in stage.rows)


def divergence_text(row: Row, stage: Stage) -> str:
    """Say where in its block the first failure stands and which sites before it were still good."""
    same = beside(row, stage)
    before = same[: same.index(row)]
    good = [called(each.site.local) for each in before if each.outcome is Outcome.PASS]
    place = row.site.path if stage.layer is None else called(row.site.local)
    start = f"The first site to fail is the {place} of {stage.name}."
    if stage.layer is None:
        start = f"The first site to fail is {row.site}."
    return f"{start} Good before it in the same block: {', '.join(good)}." if good else start


def followable(url: str) -> str:
    """Return an address that a browser may follow, or an empty string (``javascript:`` may not)."""
    return url if url.startswith(("http://", "https://")) and not re.search(r"[\s<>]", url) else ""


def _extent(comparison: Comparison) -> str:
    row = largest_error(comparison)
    if row is None:
        return "No value differs."
    return f"The largest relative L2 error is {REL_L2.show(row.metrics[REL_L2.name])}."


def _sites(count: int) -> str:
    return f"{count} site{'' if count == 1 else 's'}"


_MOST = 12


def weight_rows(comparison: Comparison) -> list[tuple[str, int, str]]:
    """Return what is wrong with the weights, worst first: what, how many tensors, where and how."""
    found = sorted(comparison.weights, key=lambda each: not each.is_fault)
    rows = [(_word(each), each.count, each.text) for each in found[:_MOST]]
    rest = found[_MOST:]
    if rest:
        rows.append(("...", sum(each.count for each in rest), f"and {len(rest)} more findings"))
    return rows


def weight_lines(comparison: Comparison) -> list[str]:
    """Return a line for each of the first findings, for a caption."""
    return [f"weights: {text}" for _, _, text in weight_rows(comparison)]


def coverage_lines(comparison: Comparison) -> list[str]:
    """Return what was exercised of layer classes, experts and steps, where there is a choice."""
    return [*_classes(comparison), *_experts(comparison), *_steps(comparison)]


def _word(finding: WeightFinding) -> str:
    return finding.what.replace("_", " ")


def _classes(comparison: Comparison) -> Iterator[str]:
    classes = comparison.coverage.classes
    if len(classes) > 1:
        parts = (f"{each.name} {len(each.judged)} of {len(each.layers)}" for each in classes)
        yield f"layers judged by class: {', '.join(parts)}"


def _experts(comparison: Comparison) -> Iterator[str]:
    uses = comparison.coverage.experts
    if not uses:
        return
    exercised, total = sum(use.exercised for use in uses), sum(use.total for use in uses)
    where = f"{len(uses)} block{'' if len(uses) == 1 else 's'}"
    yield f"experts exercised: {exercised} of {total} in {where}{_others(uses)}"


def _others(uses: tuple[ExpertUse, ...]) -> str:
    vouched = sum(len(use.by_weights) for use in uses)
    never = sum(len(use.never) for use in uses)
    words = f", {vouched} more covered by weights" if vouched else ""
    return words + (f", {never} never" if never else "")


def _steps(comparison: Comparison) -> Iterator[str]:
    for phase, (held, judged) in comparison.coverage.steps.items():
        if judged < held:
            words = "" if judged else ", never exercised"
            yield f"{phase}: {judged} of {held} steps judged{words}"
