"""Say where it is wrong, why, what speaks for it and what to type next, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from layerparity.anatomy.site import HEAD, TOKENS, Place, Site
from layerparity.ground.numeral import numeral, percent
from layerparity.judge.evidence import stage_rows
from layerparity.judge.guilty import judged_of, may_lie_before, name_in_block
from layerparity.judge.leaps import amplified
from layerparity.record.guilt import OF_TENSORS, Cause, Guilt, Phases
from layerparity.record.verdict import DECIDED, Outcome, Row, Verdict
from layerparity.record.weights import WeightFinding
from layerparity.report.cautions import ranges
from layerparity.report.gauge import Gauge, R
from layerparity.report.headline import shown_site
from layerparity.report.reasons import reason_text
from layerparity.report.reproduce import next_lines
from layerparity.report.weights import finding_text

_WIDTH = 10


@dataclass(frozen=True)
class Answer:
    """What a comparison or a bisection found, each part apart.

    ``where`` is a sentence about the place, ``also`` name the others that go wrong by themselves.
    ``cause`` is the likeliest one, how sure it is said
    first; ``others`` are further ones. ``evidence`` are the observations, ``next`` the command
    lines that show it alone; one that begins with ``#`` is a remark on those after it.
    """

    where: str
    also: tuple[str, ...] = ()
    cause: str = ""
    others: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer as a terminal shows it: a label before each part, commands on own lines."""
        lines = [
            *_labelled("where", [self.where]),
            *_labelled("also", self.also),
            *_labelled("cause", [self.cause] if self.cause else []),
            *_labelled("or", self.others),
            *_labelled("evidence", [f"- {each}" for each in self.evidence]),
            *commands_text(self.next),
        ]
        return "\n".join(lines)


def commands_text(lines: Sequence[str]) -> list[str]:
    """Return what to type next as a terminal shows it: under a label, on lines of their own."""
    return ["next", *(f"  {line}" for line in lines)] if lines else []


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{_WIDTH}}{line}"


# Each number with what it is measured against: the two are not the same tensor.
_NUMBERS = (
    ("error_ratio", "error against the reference {} times the floor of rounding", 3),
    ("rel_l2", "relative L2 error against the golden {}", 2),
    ("norm_ratio", "norm {} times the golden's", 4),
)
_SURE = ((0.9, "very likely"), (0.7, "likely"), (0.4, "plausible"), (0.0, "a guess"))
_OTHERS = 3
_ALSO = 6


def how_sure(cause: Cause) -> str:
    """Return how often such a cause is true in words, with the share: ``likely (75 %)``.

    One that gives the candidate's numbers to rounding is shown. Of one whose rule had no case when
    that was measured no share is known.
    """
    known = next(word for least, word in _SURE if cause.confidence >= least)
    # No number of cases shows that a cause is always true.
    share = "not measured" if cause.cases == 0 else f"{min(99, round(100 * cause.confidence))} %"
    return f"{'shown' if cause.shown else known} ({share})"


def distinct(causes: Sequence[Cause]) -> list[Cause]:
    """Return causes, the surest first, of which each is another mistake.

    What two rules say of one mistake is one cause, and so is what is said of tensors alone (lost,
    altered) where a cause before it explains the same ones: it is a reason of that one.
    """
    told: list[Cause] = []
    for cause in causes:
        of = {each.name for each in cause.findings}
        for place, known in enumerate(told):
            same = cause.id == known.id
            explained = cause.id in OF_TENSORS and of <= {each.name for each in known.findings}
            if same or (of and explained):
                findings = known.findings or cause.findings
                more = cause.reasons if same else (cause.sentence,)
                reasons = tuple(dict.fromkeys((*known.reasons, *more)))
                told[place] = replace(known, findings=findings, reasons=reasons)
                break
        else:
            told.append(cause)
    return told


def answer_of(
    verdict: Verdict,
    commands: Sequence[str] | None = None,
    last: bool = False,
    further: Sequence[Guilt] | None = None,
) -> Answer | None:
    """Return where it is wrong, why, what speaks for it and what to type next.

    None where nothing is wrong. ``commands`` replace those that show the place again, ``further``
    the other places that the verdict names. ``last`` says that the search was for the last wrong
    block.
    """
    guilt, site = verdict.guilty, shown_site(verdict)
    if site is None:
        return None
    shown = tuple(next_lines(verdict, site) if commands is None else commands)
    if guilt is None:
        return Answer(_unplaced(site, verdict), next=shown)
    which = "last wrong block's first" if last else "first"
    told = distinct(verdict.causes)
    causes = [f"{how_sure(each)}: {each.sentence}" for each in told] or [""]
    reasons = reasons_of(told[0]) if told else ()
    evidence = [*_at_the_place(guilt, verdict), *_around_it(guilt, verdict), *reasons]
    evidence += [f"ruled out: {each}" for each in verdict.ruled_out]
    return Answer(
        where=_first(guilt, verdict, which),
        also=tuple(_also(verdict.further if further is None else further)),
        cause=causes[0] or "no known cause fits",
        others=tuple(causes[1 : 1 + _OTHERS]),
        evidence=tuple(dict.fromkeys(evidence)),
        next=shown,
    )


def _first(guilt: Guilt, verdict: Verdict, which: str) -> str:
    """Say that a place is the first wrong one, or that it is the first one that anybody saw."""
    if not may_lie_before(judged_of(verdict), guilt):
        return f"{guilt} is the {which} wrong place{_on_ranks(guilt)}"
    seen = [
        row.site
        for row in takewhile(lambda row: row.site != guilt.site, verdict.rows)
        if row.metrics and row.outcome is not Outcome.FAIL and row.site.pass_step == guilt.step
    ]
    between = f"between {seen[-1]} and it" if seen else "before it"
    return (
        f"{guilt.site} is wrong, and nothing {between} was judged: any place up to {guilt} may be"
    )


def _on_ranks(guilt: Guilt) -> str:
    """Return which ranks are at fault, where that is known."""
    if not guilt.ranks:
        return ""
    if len(guilt.ranks) == guilt.degree:
        return f", on each of {guilt.degree} ranks"
    many = "s" if len(guilt.ranks) > 1 else ""
    return f", on rank{many} {ranges(guilt.ranks)} of {guilt.degree}"


def _unplaced(site: Site, verdict: Verdict) -> str:
    """Say of the first site that fails, where no place is to blame, where its error comes from."""
    heads = [row for row in verdict.rows if row.site.path == HEAD and row.outcome in DECIDED]
    if site.path == TOKENS and not heads:
        return f"{site} is wrong, and nothing that it is chosen by was judged: any place may be"
    given = f"{site} differs, and it is what {site.path} was given"
    first = f"{site} fails first, and what it is computed from fails as well"
    return f"No place goes wrong by itself: {given if site.end == 'in' else first}"


def _also(further: Sequence[Guilt]) -> Iterator[str]:
    """Yield a line for each component that goes wrong elsewhere, and what shows it."""
    alike: dict[tuple[str, str, bool], list[Guilt]] = {}
    for each in further:
        alike.setdefault((each.component, each.detail, each.site is None), []).append(each)
    for count, found in enumerate(alike.values()):
        first = found[0]
        if count == _ALSO:
            yield f"and {sum(map(len, list(alike.values())[count:]))} more places"
            return
        layers = [each.layer for each in found if each.layer is not None]
        of = f", and in layers {ranges(layers[1:])}" if layers[1:] else ""
        if first.site is not None:
            how = f"{first.site} fails"
        else:
            how = f"weights differ: {tensors_text(first.findings)}"
        yield f"{first} goes wrong by itself{of}: {how}"


def _at_the_place(guilt: Guilt, verdict: Verdict) -> Iterator[str]:
    """Yield the good inputs, the failing site, its numbers and its weights."""
    if guilt.good:
        many = "pass" if len(guilt.good) > 1 else "passes"
        yield f"{', '.join(str(site) for site in guilt.good)} {many}"
    row = next((row for row in verdict.rows if row.site == guilt.site), None)
    if row is not None:
        broken = [Gauge.of(each) for each in row.breaches]
        # R itself is among the numbers.
        first = [] if any(each.measure is R for each in broken) else [b.text for b in broken[:1]]
        numbers = ", ".join([*first, *filter(None, [numbers_text(row)])])
        numbers = numbers or (reason_text(row.why) if row.why is not None else "")
        yield f"{guilt.site} fails" + (f": {numbers}" if numbers else "")
    if guilt.between is not None:
        start, end = guilt.between
        names = f"{', '.join(guilt.suspects[:-1])} or {guilt.suspects[-1]}"
        yield f"nothing is observed between {start} and {end}: {names} is wrong"
    if guilt.findings:
        yield f"weights differ: {tensors_text(guilt.findings)}"
    if guilt.also:
        yield f"wrong on good inputs as well: {', '.join(guilt.also)}"
    for site in guilt.unjudged:
        yield f"{site.local} was not judged: the fault may lie before it"


def _around_it(guilt: Guilt, verdict: Verdict) -> Iterator[str]:
    """Yield what is absorbed, which phases show it, and what else seems wrong in the block."""
    if guilt.absorbed:
        yield f"{_few(guilt.absorbed)} differ as well, but what they compute passes: absorbed"
    if guilt.phases is Phases.DECODE_ONLY:
        yield f"only decoding shows it, from step {guilt.first_step} on: the prefill passes"
    elif guilt.phases is Phases.PREFILL_ONLY:
        yield "only the prefill shows it: the decode steps pass"
    if guilt.site is None:
        yield _unshown(guilt, verdict)
    if guilt.layer is None:
        return
    rows = stage_rows(verdict, Place(guilt.layer), guilt.step)
    block = verdict.blocks.block(guilt.layer, rows)
    for component, leap in amplified(rows, block).items():
        if component not in {name_in_block(guilt), *guilt.also}:
            yield (
                f"{component} seems wrong as well: its output's error is {numeral(leap, 2)} times "
                "that of what it is fed"
            )


def _unshown(guilt: Guilt, verdict: Verdict) -> str:
    """Say why weights that differ show at no site of their own block, or outside the blocks."""
    stage = guilt.place.stage
    rows = [row for row in verdict.rows if row.site.place.stage == stage]
    if any(row.outcome is Outcome.FAIL for row in rows):
        return f"sites of {stage} fail, but so does what it was fed: they do not tell of it"
    if not any(row.outcome in DECIDED for row in rows):
        return f"no site of {stage} was judged: only its weights tell of it"
    return (
        f"no site of {stage} fails: the difference is absorbed downstream, or these inputs do not "
        "exercise it"
    )


def tensors_text(findings: Sequence[WeightFinding]) -> str:
    """Return the names of the tensors that findings are about, in a line, the rest counted."""
    return _few([each.name for each in findings])


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def numbers_text(row: Row) -> str:
    """Return the few numbers of a row that a person asks for first."""
    known = row.metrics
    texts = [
        form.format(numeral(known[name], digits))
        for name, form, digits in _NUMBERS
        if math.isfinite(known.get(name, math.nan))
    ]
    if math.isfinite(agreed := known.get("set_agreement", math.nan)):
        texts.append(f"what is chosen is the golden's at {percent(agreed)} of the tokens")
    if known.get("rel_l2") == math.inf:
        texts.append("the golden is zero there, so no error relative to it")
    elif math.isnan(known.get("rel_l2", 0.0)):
        texts.append("no pair of finite numbers")
    return ", ".join(texts)


def cause_line(cause: Cause) -> str:
    """Return a cause as a line of Markdown, with how sure its rule is and its reasons."""
    reasons = f" ({'; '.join(reasons_of(cause))})" if reasons_of(cause) else ""
    return f"- {how_sure(cause)} `{cause.id}`: {cause.sentence}{reasons}"


def reasons_of(cause: Cause) -> list[str]:
    """Return a cause's reasons in words: what is wrong with weights, then its rule's own."""
    return [*(finding_text(each) for each in cause.findings), *cause.reasons]
