"""A verdict with all that is said of it, and whether two of its sentences contradict each other."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from report_samples import html_of, markdown_of
from rich.console import Console

from layerparity.anatomy.site import Site
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report import headline as words
from layerparity.report.answer import Answer, answer_of
from layerparity.report.columns import Columns
from layerparity.report.reproduce import reproduce
from layerparity.report.stages import fold, stages
from layerparity.report.table import closing_table


@dataclass(frozen=True)
class Story:
    """A verdict with all that is said of it."""

    verdict: Verdict

    @cached_property
    def console(self) -> str:
        target = io.StringIO()
        Console(file=target, width=400).print(closing_table(self.verdict))
        return target.getvalue() + (self.answer.text if self.answer else "")

    @cached_property
    def answer(self) -> Answer | None:
        return answer_of(self.verdict)

    @cached_property
    def markdown(self) -> str:
        return re.sub(r"\\([\\`*_{}\[\]<>#|~!])", r"\1", markdown_of(self.verdict))

    @cached_property
    def html(self) -> str:
        return html_of(self.verdict).replace("&#39;", "'")

    @cached_property
    def page(self) -> str:
        html = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", self.html, flags=re.S)
        return " ".join(re.sub(r"<[^>]+>", " ", html).split())

    @cached_property
    def rows(self) -> dict[str, Row]:
        return {str(each.site): each for each in self.verdict.rows}

    @cached_property
    def failing(self) -> list[Row]:
        return [each for each in self.verdict.rows if each.outcome is Outcome.FAIL]

    @property
    def faults(self) -> list[Any]:
        return [each for each in self.verdict.weights if each.is_fault]

    @property
    def places(self) -> list[Any]:
        first = [self.verdict.guilty] if self.verdict.guilty is not None else []
        return [*first, *self.verdict.further]

    def told(self) -> Iterator[str]:
        yield from (self.console, self.markdown, self.page)


def contradictions(story: Story) -> Iterator[str]:
    """Yield what contradicts; the predicates, one a function, are all that is checked."""
    for each in (
        _outcome_is_that_of_rows_and_weights,
        _headline_is_said_alike,
        _whole_model_is_no_better,
        _layers_end_as_their_rows_and_weights,
        _what_passes_passed,
        _what_does_not_fail_does_not,
        _places_are_all_there_in_order,
        _the_first_place_is_everywhere_the_same,
        _counts_add_up,
    ):
        yield from (f"{each.__name__}: {what}" for what in each(story))


def _outcome_is_that_of_rows_and_weights(story: Story) -> Iterator[str]:
    wrong = bool(story.failing or story.faults)
    outcome = story.verdict.outcome
    if wrong is not (outcome is Outcome.FAIL):
        yield f"{outcome} with {len(story.failing)} sites and {len(story.faults)} weights"


def _headline_is_said_alike(story: Story) -> Iterator[str]:
    head = words.headline(story.verdict)
    if not " ".join(story.console.split()).startswith(head):
        yield f"the terminal begins {story.console[:80]!r}"
    if not story.markdown.startswith(f"# {head}"):
        yield f"Markdown begins {story.markdown[:80]!r}"
    if f"{head} · layerparity" not in story.html:
        yield f"the page's title is not {head}"
    if " ".join(head.split()) not in story.page.replace(" , and ", ", and "):
        yield f"the page's heading is not {head}"
    if (story.verdict.outcome is Outcome.FAIL) is not (story.answer is not None):
        yield "an answer is given where nothing is wrong, or none where something is"


def _whole_model_is_no_better(story: Story) -> Iterator[str]:
    said = re.search(r"^whole model: (\w+)", story.console, re.M)
    rank = {"pass": 0, "inconclusive": 1, "fail": 2}
    if said is None or rank[said[1]] < rank[story.verdict.outcome.value]:
        yield f"{said and said[0]} beside {story.verdict.outcome}"


def _layers_end_as_their_rows_and_weights(story: Story) -> Iterator[str]:
    found = stages(story.verdict)
    for each in found:
        homes = [f.stage if f.layer is None else f"layers.{f.layer}" for f in story.faults]
        faulty = each.key in homes
        failing = [r for r in each.rows if r.outcome is Outcome.FAIL]
        if (each.outcome is Outcome.FAIL) is not bool(failing or faulty):
            yield f"{each.name} ends as {each.outcome}"
        if len(fold(found)) == len(found):
            line = re.search(rf"^│ {re.escape(each.name)} +│ (\w+)", story.console, re.M)
            if line is None or line[1] != each.outcome.value:
                yield f"{each.name} is told as {line and line[0]}"


def _what_passes_passed(story: Story) -> Iterator[str]:
    answer = story.answer
    for line in (*answer.evidence, answer.cause) if answer is not None else ():
        said = re.match(r"^((?:[\w.@]+:[\w.@]+(?:, )?)+) pass(?:es)?\b", line)
        for name in said[1].split(", ") if said is not None else ():
            if name not in story.rows or story.rows[name].outcome is not Outcome.PASS:
                yield f"{line!r}, and it is {name in story.rows and story.rows[name].outcome}"
    shown = words.first_failure(story.verdict)
    text = words.divergence_text(shown, story.verdict) if shown is not None else ""
    good = re.search(r"Good before it in the same block: (.*)\.$", text)
    if good and not set(good[1].split(", ")) <= {
        words.label(r.site.local) for r in story.verdict.rows if r.outcome is Outcome.PASS
    }:
        yield text
    if "judged are within" in words.because(story.verdict) and story.failing:
        yield words.because(story.verdict)


def _what_does_not_fail_does_not(story: Story) -> Iterator[str]:
    for text in story.told():
        for stage in re.findall(r"no site of ([\w.]+) fails", text):
            if any(r.site.place.stage == stage for r in story.failing):
                yield f"no site of {stage} fails"
        said = re.search(r"(?i)\bno site fails|nothing judged fails|nothing fails", text)
        if said and story.failing:
            yield said[0]
        for count, _ in re.findall(
            r"(\d+) more (?:layers or modules|layer or module)( too)?", text
        ):
            others = sum(s.outcome is Outcome.FAIL for s in stages(story.verdict)) - 1
            if int(count) != others:
                yield f"{count} more layers, and there are {others}"


def _places_are_all_there_in_order(story: Story) -> Iterator[str]:
    """Every weight and, of blocks fed from the golden, every failing stage with a good input."""
    verdict, named = story.verdict, [each.place.stage for each in story.places]
    if len(set(named)) < len(named):
        yield f"a stage is named twice: {named}"
    told = {found.name for place in story.places for found in place.findings}
    yield from (f"{f.name} is in no place" for f in story.faults if f.name not in told)
    if verdict.candidate.only_feed == "isolated":
        for each in stages(verdict):
            fed = [r for r in each.rows if r.site.local in (":in", f"{each.key}:in")]
            by_itself = {r.site.pass_step for r in each.rows if r.outcome is Outcome.FAIL} - {
                r.site.pass_step for r in fed if r.outcome is Outcome.FAIL
            }
            if by_itself and each.key not in named:
                yield f"{each.key} goes wrong by itself, and only {named} are named"
    order = [
        (0 if p.site is None or p.findings else p.site.phase != "prefill", _at(p))
        for p in story.places
    ]
    if order != sorted(order):
        yield f"not in the order of the data: {order}"
    for each in story.places:
        if each.site is not None and story.rows[str(each.site)].outcome is not Outcome.FAIL:
            yield f"{each} is shown by {each.site}, which does not fail"
        if each.site is None and not each.findings:
            yield f"nothing tells of {each}"


def _at(place: Any) -> tuple[int, int]:
    if place.layer is not None:
        return 1, place.layer
    return {"embed_tokens": (0, 0), "norm": (2, 0), "lm_head": (3, 0)}.get(
        place.place.module, (4, 0)
    )


def _the_first_place_is_everywhere_the_same(story: Story) -> Iterator[str]:
    verdict, guilty = story.verdict, story.verdict.guilty
    if guilty is None:
        return
    stage, answer = guilty.place.stage, story.answer
    if answer is None or not answer.where.startswith(str(guilty)):
        yield f"where is {answer and answer.where}"
    if Site.parse(f"{verdict.where.partition(':')[0]}:out").place.stage != stage:
        yield f"FAIL at {verdict.where}"
    failing = Columns(stages(verdict)).failing
    if failing is not None and stages(verdict)[failing].key != stage:
        yield f"figures mark {stages(verdict)[failing].key}"
    first = words.first_failure(verdict)
    if guilty.site is not None and (first is None or first.site != guilty.site):
        yield f"the first divergence is {first and first.site}"
    shown = next((each.shown.site for each in stages(verdict) if each.key == stage), None)
    if guilty.site is not None and shown != guilty.site:
        yield f"its layer shows {shown}"
    alone = [command for purpose, command in reproduce(verdict) if purpose.endswith(" alone")]
    asked = f" layer={guilty.layer} " if guilty.layer is not None else f"component={stage}"
    if alone and asked not in f"{alone[0]} ":
        yield f"to reproduce it one types {alone[0]}"
    if answer is not None and len(answer.also) == 0 and verdict.further:
        yield "the other places are not listed"


def _counts_add_up(story: Story) -> Iterator[str]:
    *each, total = map(int, re.findall(r"\d+", words.counts_text(story.verdict)))
    asked = words.asked_counts(story.verdict)
    if sum(each) != total:
        yield words.counts_text(story.verdict)
    lines = words.left_out_lines(story.verdict)
    counted = {
        start: sum(int(line.split(": ")[1].split()[0]) for line in lines if line.startswith(start))
        for start in ("skipped", "not asked for")
    }
    if counted["skipped"] != asked["skipped"]:
        yield f"{asked['skipped']} are skipped, and {lines} are told"
    if total + counted["not asked for"] != story.verdict.total:
        yield f"{total} asked for, {counted['not asked for']} not, of {story.verdict.total}"
