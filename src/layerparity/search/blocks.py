"""Find the first wrong block, the component in it and its likeliest cause, by further runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Place
from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.judge.conclude import portrayed, with_guilt
from layerparity.judge.evidence import stage_rows
from layerparity.judge.sides import open_sides
from layerparity.making.steps import settings_to_judge
from layerparity.record.guilt import Cause, Guilt
from layerparity.record.stored_run import Kept
from layerparity.record.verdict import FILE_NAME as VERDICT_FILE
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import Answer, answer_of
from layerparity.report.reasons import breach_text, reason
from layerparity.report.reproduce import REMARK
from layerparity.report.search import markdown
from layerparity.search.bench import KIND, Bench
from layerparity.search.strategies import STRATEGIES, SearchResult, choose
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.links import say_link

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.active import ActiveRun

_SHOWN = {
    "error_ratio": "R (reference)",
    "rel_l2": "rel L2 (golden)",
    "norm_ratio": "norm ratio (golden)",
}


@dataclass(frozen=True)
class Conclusion:
    """What a bisection ends with: the search, the answer, and the verdict on the guilty place."""

    result: SearchResult
    answer: Answer
    exit: Exit
    verdict: Verdict | None = None

    @property
    def guilt(self) -> Guilt | None:
        """The guilty place, where something is wrong."""
        wrong = self.verdict is not None and self.exit is Exit.FAILED
        return self.verdict.guilty if wrong and self.verdict else None

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The likely causes, the likeliest first."""
        return self.verdict.causes if self.guilt and self.verdict else ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return {
            "answer": asdict(self.answer),
            "guilt": self.guilt.to_dict() if self.guilt else None,
            "causes": [asdict(cause) for cause in self.causes],
            "steps": [asdict(step) for step in self.result.steps],
            "commands": [each for each in self.answer.next if not each.startswith(REMARK)],
        }


def bisect(config: Config) -> Kept:
    """Search, descend into the wrong place, keep it as a run and print it."""
    from layerparity.tracking.opening import open_store

    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = Bench(config, store, golden)
    strategy = choose(config.job.strategy, bench)
    name = config.name or f"bisect-{golden[0].name}"
    console.say(f"golden: {golden[0].name}; strategy={strategy}")
    with store.start(name, KIND, bench.tags(strategy), {"strategy": strategy}) as active:
        bench.parent = active.id
        conclusion = conclude(bench, STRATEGIES[strategy](bench))
        if conclusion.verdict is not None:
            shown = _as_reported(conclusion.verdict, bench)
            conclusion = replace(conclusion, verdict=shown)
        _log(active, conclusion)
    _print(conclusion, active)
    return Kept(conclusion.exit, active.id)


def conclude(bench: Bench, result: SearchResult) -> Conclusion:
    """Descend into the place that was found, and say what is wrong there and why."""
    if result.place is None:
        return _nothing_wrong(bench, result)
    verdict, note = _descended(bench, result)
    guilt = verdict.guilty
    if guilt is None:
        # The chain leaves rounding at a block that is right by itself.
        answer = Answer(
            f"The accumulated error leaves rounding at {result.place}, but {result.place} alone is "
            "right",
            cause="the error is spread over the blocks before it, or comes from how they are "
            "joined",
            next=bench.scanning(),
        )
        return _concluded(result, answer, Exit.INCONCLUSIVE, verdict)
    commands = bench.commands(guilt.layer, guilt.component, guilt.decoding)
    further = _further(guilt, verdict, result)
    named = answer_of(verdict, commands, last=bool(result.note), further=further)
    assert named is not None
    notes = [each for each in (note, result.note) if each]
    answer = replace(named, evidence=(*named.evidence, *notes))
    return _concluded(result, answer, Exit.FAILED, verdict)


def _concluded(
    result: SearchResult, answer: Answer, ending: Exit, verdict: Verdict | None
) -> Conclusion:
    """Return a conclusion whose verdict, and so its report, ends as the bisection does."""
    ends = {Exit.OK: Outcome.PASS, Exit.FAILED: Outcome.FAIL}
    outcome = ends.get(ending, Outcome.INCONCLUSIVE)
    if verdict is not None and verdict.outcome is not outcome:
        whole = replace(verdict.whole, outcome=outcome)
        verdict = replace(verdict, outcome=outcome, whole=whole)
    return Conclusion(result, answer, ending, verdict)


def _further(guilt: Guilt, verdict: Verdict, result: SearchResult) -> list[Guilt]:
    """Return what else goes wrong by itself: by the verdict on the place, and by the search's."""
    searched = result.verdict
    first = [] if searched is None or searched.guilty is None else [searched.guilty]
    later = () if searched is None else searched.further
    by_stage: dict[str, Guilt] = {}
    for each in (*first, *later, *verdict.further):
        by_stage.setdefault(each.place.stage, each)
    by_stage.pop(guilt.place.stage, None)
    return list(by_stage.values())


def _nothing_wrong(bench: Bench, result: SearchResult) -> Conclusion:
    verdict = result.verdict
    if verdict is not None and verdict.outcome is Outcome.FAIL:
        answer = answer_of(verdict)
        assert answer is not None, "a verdict that fails has a place, or a site that fails"
        return _concluded(result, answer, Exit.FAILED, verdict)
    commands: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    ending = Exit.INCONCLUSIVE
    if result.doubt:
        where = "Nothing fails, but not every block could be judged"
        evidence, commands = (result.doubt,), bench.scanning()
    elif verdict is None or verdict.outcome is Outcome.PASS:
        where = "Nothing is wrong: no block, and nothing outside the blocks, leaves rounding"
        ending = Exit.OK
    else:
        where = "Nothing fails, but not everything could be judged: job=compare lists what was not"
    answer = Answer(where, evidence=evidence, next=commands)
    return _concluded(result, answer, ending, verdict)


def _descended(bench: Bench, result: SearchResult) -> tuple[Verdict, str]:
    """Return the verdict on a wrong block, run alone with everything observed; and a note on it."""
    place, verdict = result.place, result.verdict
    if place is None or place.layer is None:
        assert verdict is not None, "a place outside the blocks was judged by local error"
        return verdict, ""
    decoding = verdict is not None and verdict.guilty is not None and verdict.guilty.decoding
    closer = bench.decoding(place.layer) if decoding else bench.alone(place.layer)
    if closer is not None:
        from layerparity.making.replay import replays

        golden, candidate = _sides_of(closer, bench)
        sides = open_sides(golden, candidate)
        closer = with_guilt(closer, sides[0], place, candidate=sides[1], replays=replays)
        if closer.guilty is not None or verdict is None or verdict.guilty is None:
            return closer, ""
    assert verdict is not None
    note = "with every component observed the block passes: observing it changes what is computed"
    return verdict, note if closer is not None else ""


def _as_reported(verdict: Verdict, bench: Bench) -> Verdict:
    """Return the verdict on the guilty place as its report shows it: keys and portrait."""
    verdict = replace(verdict, settings=settings_to_judge(bench.config))
    if verdict.guilty is None:
        return verdict
    return portrayed(verdict, *_sides_of(verdict, bench))


def _sides_of(verdict: Verdict, bench: Bench) -> tuple[list[StoredRun], list[StoredRun]]:
    """Return the golden's and the candidate's runs of a verdict."""
    golden, candidate = (
        [bench.store.find(made.named)[0] for made in side.made]
        for side in (verdict.golden, verdict.candidate)
    )
    return golden, candidate


def _log(active: ActiveRun, conclusion: Conclusion) -> None:
    """Keep a conclusion in its run: the record, the text, the tags, and the report."""
    active.log_text(json.dumps(conclusion.to_dict(), indent=1), "bisection.json")
    text = markdown(conclusion.answer, conclusion.result.steps, conclusion.causes)
    active.log_text(text, "bisection.md")
    guilt = conclusion.guilt
    tags = {
        "verdict": conclusion.exit.name.lower(),
        "guilty": str(guilt.place) if guilt else "",
        "cause": conclusion.causes[0].id if conclusion.causes else "",
        "mlflow.note.content": text,
    }
    active.set_tags(tags)
    if conclusion.verdict is not None:
        from layerparity.report.html import render_html

        active.log_text(conclusion.verdict.to_json(), VERDICT_FILE, tagged=True)
        active.log_text(render_html(conclusion.verdict, conclusion.answer), "report.html")


def _print(conclusion: Conclusion, active: ActiveRun) -> None:
    """Print the steps, the sites of the guilty place, the answer and the links."""
    rows = [(s.asked, "wrong" if s.wrong else "right", s.told) for s in conclusion.result.steps]
    console.table("Steps", ("asked", "", "told"), rows)
    if conclusion.guilt is not None and conclusion.verdict is not None:
        _print_sites(conclusion.guilt, conclusion.verdict)
    console.say(f"\n{conclusion.answer.text}\n")
    if conclusion.verdict is not None:
        from layerparity.report.keep import say_report

        say_report(active)
    say_link(active, active.connection.config)


def _print_sites(guilt: Guilt, verdict: Verdict) -> None:
    """Print the sites of the guilty place in the guilty phase, in forward order."""
    from layerparity.ground.numeral import numeral

    stage = Place.parse(guilt.place.stage)
    rows = []
    for local, row in stage_rows(verdict, stage, guilt.step).items():
        numbers = [numeral(row.metrics[n]) if n in row.metrics else "-" for n in _SHOWN]
        why = breach_text(row.breaches[0], row.metrics) if row.breaches else reason(row)
        rows.append((local, row.outcome.value, *numbers, why))
    step = f", decode step {guilt.site.step}" if guilt.site and guilt.decoding else ""
    console.table(f"{stage}{step}", ("site", "outcome", *_SHOWN.values(), "reason"), rows)
