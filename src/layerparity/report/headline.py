"""Say a verdict in words: headline, why, first divergence and coverage."""

from __future__ import annotations

import re
from collections import Counter

from layerparity.anatomy.block import label
from layerparity.record.side import Side
from layerparity.record.verdict import DECIDED, Outcome, Row, Verdict
from layerparity.report.cautions import doubt_text, layer_classes_text, unfinished_text
from layerparity.report.measures import REL_L2
from layerparity.report.reasons import reason_of_steps
from layerparity.report.stages import Stage, beside, first_to_fail, severity, stages
from layerparity.report.weights import finding_text

GLYPH = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✕",
    Outcome.INCONCLUSIVE: "?",
    Outcome.MISSING: "∅",
    Outcome.SKIPPED: "–",
}


def headline(verdict: Verdict) -> str:
    """Return ``PASS``, ``FAIL at <first wrong place>`` or ``INCONCLUSIVE: <why>``."""
    why = f": {_open_end(verdict)}" if verdict.outcome is Outcome.INCONCLUSIVE else ""
    return verdict.outcome.value.upper() + _at(verdict) + why


def _open_end(verdict: Verdict) -> str:
    """Return what leaves a verdict open: the commonest reason of its sites, else a doubt."""
    open_rows = [r for r in verdict.rows if r.outcome in (Outcome.MISSING, Outcome.INCONCLUSIVE)]
    if open_rows:
        ((why, count),) = Counter(reason_of_steps(row) for row in open_rows).most_common(1)
        return f"{count} of {_sites(verdict.total)}: {why}"
    first, *more = [
        *(doubt_text(each, verdict.coverage) for each in verdict.coverage.doubts),
        *(unfinished_text(each) for each in verdict.unfinished),
        "nothing that was computed was judged",
    ]
    silent = [f"; the {side}'s port does not say what weights it holds" for side in verdict.silent]
    others = f" (and {len(more) - 1} more)" if len(more) > 1 else ""
    return "".join([first, *silent, others])


def outcome_text(verdict: Verdict) -> str:
    """Return how a verdict ends, and of one that fails where."""
    return verdict.outcome.value + _at(verdict)


def _at(verdict: Verdict) -> str:
    where = where_text(verdict) if verdict.outcome is Outcome.FAIL else ""
    return f" at {where}" if where else ""


def where_text(verdict: Verdict) -> str:
    """Return the first wrong place: what is wrong with its weights, else the site that shows it."""
    weights = verdict.guilty.weights if verdict.guilty is not None else None
    return verdict.where if weights is None else finding_text(weights)


def because(verdict: Verdict) -> str:
    """Return one or two sentences that say what the verdict rests on."""
    counts = verdict.counts
    judged = sum(counts.get(each.value, 0) for each in DECIDED)
    if verdict.outcome is Outcome.FAIL:
        failed = counts.get(Outcome.FAIL.value, 0)
        verb = "fails" if failed == 1 else "fail"
        share = f"{failed} of the {_sites(judged)} judged"
        return f"{share} {verb} the {verdict.tolerance} tolerance."
    if verdict.outcome is Outcome.PASS:
        verb = "is" if judged == 1 else "are"
        within = f"All {_sites(judged)} judged {verb} within the {verdict.tolerance} tolerance."
        row = largest_error(verdict)
        if row is None:
            return f"{within} No value differs."
        error = REL_L2.show(row.metrics[REL_L2.name])
        return f"{within} The largest relative L2 error is {error}."
    if not judged:
        return "No site could be judged."
    open_ends = [
        f"{_sites(counts[each.value])} {each.value}"
        for each in (Outcome.MISSING, Outcome.INCONCLUSIVE)
        if counts.get(each.value)
    ]
    why = " and ".join(open_ends) or _open_end(verdict)
    return f"Nothing judged fails, but this is no pass: {why}."


def whole_model(verdict: Verdict) -> str:
    """Return the verdict on the whole model, to stand beside a label that says so."""
    whole = verdict.whole
    if whole.outcome is Outcome.PASS:
        return whole.outcome.value
    compared = f"{whole.compared} of {whole.blocks} blocks compared"
    in_part = f", {whole.in_part} in part" if whole.in_part else ""
    without = f", without {', '.join(whole.absent)}" if whole.absent else ""
    never = f", {' and '.join(whole.unexercised)} never exercised" if whole.unexercised else ""
    names = layer_classes_text(whole.unseen, verdict.coverage)
    unseen = f"; never compared: {names}" if names else ""
    return f"{whole.outcome.value}, {compared}{in_part}{without}{never}{unseen}"


def run_text(side: Side) -> str:
    """Return a side's run id; of a sweep's many, the first and how many more there are."""
    if not side.made:
        return ""
    first, *more = [made.named for made in side.made]
    return ",".join([first, *more]) if len(more) < 2 else f"{first} and {len(more)} more"


def side_facts(side: Side) -> list[tuple[str, str]]:
    """Return what a side ran on, as (what, text); a text is empty where nothing says."""
    texts = {
        "model": side.model,
        "backend": side.backend,
        "device": side.device,
        "dtype": ", ".join(side.dtypes),
        "port": side.port,
        "scope": side.scope,
        "feed": ", ".join(side.feeds),
    }
    return list(texts.items())


def feed_note(verdict: Verdict) -> str:
    """Say what later failures mean under the candidate's feed; empty where it is unknown."""
    return {
        "isolated": "Every block was fed the golden's own input, so an error is the block's own.",
        "chained": "Each block was fed by the block before it, so what follows the first "
        "failure may only be inherited.",
    }.get(verdict.candidate.only_feed, "")


def first_failure(verdict: Verdict) -> Row | None:
    """Return the row that shows the first wrong place, or None where no site fails."""
    guilty = verdict.guilty.site if verdict.guilty is not None else None
    shows = next((row for row in verdict.rows if row.site == guilty), None)
    return shows or first_to_fail(verdict.rows)


def largest_error(verdict: Verdict) -> Row | None:
    """Return the row with the largest relative L2 error, or None where there is no error at all."""
    measured = [row for row in verdict.rows if REL_L2.name in row.metrics and severity(row)]
    return max(measured, key=severity, default=None)


def stage_of(row: Row, verdict: Verdict) -> Stage:
    """Return the stage that a row of the comparison belongs to."""
    return next(stage for stage in stages(verdict.rows) if row in stage.rows)


def divergence_text(row: Row, stage: Stage) -> str:
    """Say where in its block the first failure stands and which sites before it were still good."""
    same = beside(row, stage)
    before = same[: same.index(row)]
    good = [label(each.site.local) for each in before if each.outcome is Outcome.PASS]
    place = row.site.path if stage.layer is None else label(row.site.local)
    start = f"The first site to fail is the {place} of {stage.name}."
    if stage.layer is None:
        start = f"The first site to fail is {row.site}."
    return f"{start} Good before it in the same block: {', '.join(good)}." if good else start


def followable(url: str) -> str:
    """Return an address that a browser may follow, or an empty string (``javascript:`` may not)."""
    return url if url.startswith(("http://", "https://")) and not re.search(r"[\s<>]", url) else ""


def _sites(count: int) -> str:
    return f"{count} site{'' if count == 1 else 's'}"


def coverage_lines(verdict: Verdict) -> list[str]:
    """Return what was exercised of layer classes, experts and steps, where there is a choice."""
    classes, lines = verdict.coverage.classes, []
    if len(classes) > 1:
        parts = (f"{each.name} {len(each.judged)} of {len(each.layers)}" for each in classes)
        lines.append(f"layers judged by class: {', '.join(parts)}")
    uses = [use for use in verdict.coverage.experts if use.judged]
    if uses:
        exercised, total = sum(use.exercised for use in uses), sum(use.total for use in uses)
        where = f"{len(uses)} block{'' if len(uses) == 1 else 's'}"
        vouched = sum(len(use.by_weights) for use in uses)
        never = sum(len(use.never) for use in uses)
        others = f", {vouched} more covered by weights" if vouched else ""
        others += f", {never} never" if never else ""
        lines.append(f"experts exercised: {exercised} of {total} in {where}{others}")
    lines += _routed_apart(verdict)
    for phase, (steps, judged) in verdict.coverage.steps.items():
        if judged < steps:
            words = "" if judged else ", never exercised"
            lines.append(f"{phase}: {judged} of {steps} steps judged{words}")
    return lines


def _routed_apart(verdict: Verdict) -> list[str]:
    """Return how many tokens the two sides chose otherwise for, where they did."""
    rows = [row for row in verdict.rows if row.metrics.get("flips") and row.site.layer is not None]
    if not rows:
        return []
    flips, outside = (
        sum(int(row.metrics.get(name, 0)) for row in rows)
        for name in ("flips", "flips_outside_noise")
    )
    layers = len({row.site.layer for row in rows})
    where = f"{layers} block{'' if layers == 1 else 's'}"
    ties = "all by ties" if not outside else f"{outside} of them by no tie"
    return [f"tokens routed apart: {flips} in {where}, {ties}"]
