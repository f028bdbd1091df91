"""Say a verdict in words: headline, why, first divergence and coverage."""

from __future__ import annotations

import re
from collections import Counter

from layerparity.anatomy.block import label
from layerparity.anatomy.site import Kind, Place, Site
from layerparity.record.findings import Coverage, TextUse
from layerparity.record.reason import ReasonKind
from layerparity.record.side import Side
from layerparity.record.verdict import DECIDED, SUPPOSED, Outcome, Row, Verdict
from layerparity.report.cautions import doubt_text, layer_classes_text, unfinished_text
from layerparity.report.gauge import gauge_text, nearest_to_limit
from layerparity.report.reasons import reason_of_steps
from layerparity.report.stages import Stage, beside, first_to_fail, stages
from layerparity.report.weights import finding_text

GLYPH = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✕",
    Outcome.INCONCLUSIVE: "?",
    Outcome.MISSING: "∅",
    Outcome.SKIPPED: "–",
}

# How many reasons are named for which sites were left out.
_REASONS = 3
# What a candidate with a known mistake is kept as.
_PLANTED = "fault"


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
    return f" at {where}{more_text(verdict)}" if where else ""


def where_text(verdict: Verdict) -> str:
    """Return the first wrong place: what is wrong with its weights, else the site that shows it."""
    weights = verdict.guilty.weights if verdict.guilty is not None else None
    return verdict.where if weights is None else finding_text(weights)


def more_text(verdict: Verdict) -> str:
    """Return how many other places go wrong by themselves, to stand behind the first one."""
    count = len(verdict.further)
    return f", and {count} more place{'' if count == 1 else 's'}" if count else ""


def because(verdict: Verdict) -> str:
    """Return one or two sentences that say what the verdict rests on."""
    counts = verdict.counts
    judged = sum(counts.get(each.value, 0) for each in DECIDED)
    failed = counts.get(Outcome.FAIL.value, 0)
    verb = "is" if judged == 1 else "are"
    within = f"All {_sites(judged)} judged {verb} within the {verdict.tolerance} tolerance"
    if verdict.outcome is Outcome.FAIL:
        if not failed:
            return f"{within}; weights are what is wrong." if judged else "Weights are wrong."
        verb = "fails" if failed == 1 else "fail"
        share = f"{failed} of the {_sites(judged)} judged"
        return f"{share} {verb} the {verdict.tolerance} tolerance."
    if verdict.outcome is Outcome.PASS:
        row = nearest(verdict)
        if row is None:
            return f"{within}. No value differs."
        return f"{within}. {nearest_text(row, verdict)}"
    return _undecided(verdict, judged)


def _undecided(verdict: Verdict, judged: int) -> str:
    """Say of a verdict that is inconclusive what is open, and why."""
    if not judged:
        return f"No site could be judged. {_why_open(verdict)}".rstrip()
    counts = verdict.counts
    open_ends = [
        f"{_sites(counts[each.value])} {each.value}"
        for each in (Outcome.MISSING, Outcome.INCONCLUSIVE)
        if counts.get(each.value)
    ]
    said = "Nothing judged fails, but this is no pass"
    if not open_ends:
        return f"{said}: {_open_end(verdict)}."
    return f"{said}: {' and '.join(open_ends)}. {_why_open(verdict)}"


def _why_open(verdict: Verdict) -> str:
    """Return the commonest reason for which sites were not judged, as a sentence of its own."""
    return f"Why, at {_open_end(verdict)}." if verdict.rows else ""


def nearest(verdict: Verdict) -> Row | None:
    """Return the decided row that is nearest to its limit; without any, that of most error."""
    decided = [row for row in verdict.rows if row.outcome in DECIDED]
    return nearest_to_limit(decided or verdict.rows, verdict.limits)


def nearest_text(row: Row, verdict: Verdict) -> str:
    """Return a sentence on the site that is nearest to its limit."""
    return f"Nearest to its limit is {row.site}: {gauge_text(row, verdict.limits)}."


def asked_counts(verdict: Verdict) -> dict[str, int]:
    """Return how many of the sites that the candidate was asked for ended in each way."""
    counts = dict(verdict.counts)
    counts[Outcome.SKIPPED.value] -= sum(map(_is_unasked, verdict.rows))
    return counts


def counts_text(verdict: Verdict) -> str:
    """Return how the sites ended that were asked for, and their sum."""
    counts = asked_counts(verdict)
    each = " + ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{each or 'nothing'} = {sum(counts.values())} sites asked for"


def left_out_lines(verdict: Verdict) -> list[str]:
    """Return a line for each reason for which sites were skipped, then for those not asked for.

    The lines of either add up.
    """
    skipped = [row for row in verdict.rows if row.outcome is Outcome.SKIPPED]
    lines = []
    for start, unasked in (("skipped", False), ("not asked for", True)):
        why = Counter(reason_of_steps(row) for row in skipped if _is_unasked(row) is unasked)
        most = why.most_common(_REASONS)
        lines += [f"{start}: {count} {text}" for text, count in most]
        rest = why.total() - sum(count for _, count in most)
        if rest:
            many = len(why) - len(most)
            lines.append(f"{start}: {rest} for {many} other reason{'' if many == 1 else 's'}")
    return lines


def _is_unasked(row: Row) -> bool:
    """Say whether the golden alone holds a site, as nobody asked the candidate for it."""
    why = row.why
    if row.outcome is not Outcome.SKIPPED or why is None:
        return False
    unrun = why.kind is ReasonKind.NO_STEP and why.values["side"] == "candidate"
    return unrun or why.kind is ReasonKind.NOT_ASKED_FOR


def whole_model(verdict: Verdict) -> str:
    """Return the verdict on the whole model, to stand beside a label that says so."""
    whole = verdict.whole
    if whole.outcome is Outcome.PASS:
        idle, texts = ", ".join(_idle(verdict.coverage)), verdict.coverage.texts
        some = some_tokens(texts) if texts is not None else ""
        passed = f"{whole.outcome.value}, at {some}" if some else whole.outcome.value
        return f"{passed}; not exercised: {idle}" if idle else passed
    compared = f"{whole.compared} of {whole.blocks} blocks compared"
    in_part = f", {whole.in_part} in part" if whole.in_part else ""
    without = f", without {', '.join(whole.absent)}" if whole.absent else ""
    never = f", {' and '.join(whole.unexercised)} never exercised" if whole.unexercised else ""
    names = layer_classes_text(whole.unseen, verdict.coverage)
    unseen = f"; never compared: {names}" if names else ""
    return f"{whole.outcome.value}, {compared}{in_part}{without}{never}{unseen}"


def _idle(coverage: Coverage) -> list[str]:
    """Return what a pass of the whole model says nothing of, as its inputs did not exercise it."""
    texts = coverage.texts
    padding = ["padding"] if texts is not None and not texts.padded else []
    decoding = [] if coverage.decoded else ["decode steps"]
    return [*decoding, *padding, *(each.name for each in coverage.too_short_for)]


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
    if verdict.on_own_values:
        return "Every site was computed from the candidate's own values, so an error is its own."
    return {
        "isolated": "Every block was fed the golden's own input, so an error is the block's own.",
        "chained": "Each block was fed by the block before it, so what follows the first "
        "failure may only be inherited.",
    }.get(verdict.feed, "")


def first_failure(verdict: Verdict) -> Row | None:
    """Return the row that shows the first wrong place, or None where no site fails.

    Where only weights tell of it, that is the row of the next place that a site shows.
    """
    guilty = () if verdict.guilty is None else (verdict.guilty,)
    sites = [each.site for each in (*guilty, *verdict.further) if each.site is not None]
    shows = next((row for row in verdict.rows if row.site in sites[:1]), None)
    return shows or first_to_fail(verdict.rows)


def shown_site(verdict: Verdict) -> Site | None:
    """Return the site at which the first wrong place is looked at; None where nothing is wrong."""
    if verdict.guilty is not None:
        return verdict.guilty.site or Place.parse(verdict.guilty.place.stage).site("out")
    row = first_to_fail(verdict.rows)
    return None if row is None else row.site


def stage_of(row: Row, verdict: Verdict) -> Stage:
    """Return the stage that a row of the comparison belongs to."""
    return next(stage for stage in stages(verdict) if row in stage.rows)


def divergence_text(row: Row, verdict: Verdict) -> str:
    """Say where in its block the first failure stands and which sites before it were still good."""
    stage = stage_of(row, verdict)
    same = beside(row, stage)
    before = same[: same.index(row)]
    good = [label(each.site.local) for each in before if each.outcome is Outcome.PASS]
    first = row is first_to_fail(verdict.rows)
    start = "The first site to fail is" if first else "What goes wrong by itself shows at"
    place = row.site if stage.layer is None else f"the {label(row.site.local)} of {stage.name}"
    parts = [f"{start} {place}."]
    guilty = verdict.guilty
    if guilty is not None and guilty.site is None:
        parts.insert(0, f"Of {guilty.place} it is the weights that are wrong.")
    if good:
        parts.append(f"Good before it in the same block: {', '.join(good)}.")
    return " ".join(parts)


def also_failing(row: Row, verdict: Verdict) -> str:
    """Say how many other layers or modules fail, and how many of these by themselves."""
    shown = stage_of(row, verdict)
    others = [each for each in stages(verdict) if each.outcome is Outcome.FAIL]
    others = [each for each in others if each.key != shown.key]
    if not others:
        return ""
    alone = sum(each.guilt is not None for each in others)
    many = "s fail" if len(others) > 1 else " fails"
    by_itself = f", {alone} of them by {'itself' if alone == 1 else 'themselves'}" if alone else ""
    return (
        f"{len(others)} more layer{'s' if len(others) > 1 else ''} or module{many} too{by_itself}."
    )


def followable(url: str) -> str:
    """Return an address that a browser may follow, or an empty string (``javascript:`` may not)."""
    return url if url.startswith(("http://", "https://")) and not re.search(r"[\s<>]", url) else ""


def _sites(count: int) -> str:
    return f"{count} site{'' if count == 1 else 's'}"


def some_tokens(texts: TextUse) -> str:
    """Return how many of all tokens were stored, where some alone are."""
    return f"{texts.stored:,} of {texts.real:,} tokens" if texts.stored else ""


def coverage_lines(verdict: Verdict) -> list[str]:
    """Return what was exercised of layer classes, experts and steps, where there is a choice."""
    classes, lines = verdict.coverage.classes, []
    if len(classes) > 1:
        parts = (f"{each.name} {len(each.judged)} of {len(each.layers)}" for each in classes)
        lines.append(f"layers judged by class: {', '.join(parts)}")
    texts = verdict.coverage.texts
    if texts is not None and texts.stored:
        lines.append(f"prefill: {some_tokens(texts)} were stored and judged")
    uses = [use for use in verdict.coverage.experts if use.judged and use.seen]
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
    return lines + _equal(verdict)


def _equal(verdict: Verdict) -> list[str]:
    """Return that all computed numbers of both sides have the same bits, where they have."""
    computed = (row for row in verdict.rows if row.outcome in DECIDED and row.site.end != "in")
    real = [row for row in computed if row.kind is Kind.REAL]
    if not real or any(row.metrics.get("max_abs_diff") != 0 for row in real):
        return []
    said = f"equal to the bit: all of {_sites(len(real))}, as a copy of the golden would be"
    planted = verdict.candidate.port == _PLANTED
    return [f"{said}: the mistake that was planted changed nothing here" if planted else said]


def _routed_apart(verdict: Verdict) -> list[str]:
    """Return how many tokens the two sides chose otherwise for, or may have, where they did."""
    lines = []
    unseen = [row for row in verdict.rows if row.metrics.get(SUPPOSED) and row.lacking is None]
    if unseen:
        count = sum(int(row.metrics[SUPPOSED]) for row in unseen)
        layers = len({row.site.layer for row in unseen})
        where = f"{layers} block{'' if layers == 1 else 's'}"
        lines = [
            f"tokens that may be routed apart: {count} in {where}, left out: the candidate shows "
            "no choices, and ties explain its errors there"
        ]
    rows = [row for row in verdict.rows if row.metrics.get("flips") and row.site.layer is not None]
    if not rows:
        return lines
    flips, outside = (
        sum(int(row.metrics.get(name, 0)) for row in rows)
        for name in ("flips", "flips_outside_noise")
    )
    layers = len({row.site.layer for row in rows})
    where = f"{layers} block{'' if layers == 1 else 's'}"
    ties = "all by ties" if not outside else f"{outside} of them by no tie"
    return [*lines, f"tokens routed apart: {flips} in {where}, {ties}"]
