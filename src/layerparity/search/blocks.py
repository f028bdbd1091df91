"""Find the first wrong block, the component in it and its likeliest cause, by further runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.judge.descend import descend
from layerparity.judge.evidence import evidence_of
from layerparity.judge.guilt import Guilt
from layerparity.mistakes.catalogue import likeliest
from layerparity.mistakes.cause import Cause
from layerparity.record.comparison import REMARK, Answer, Comparison
from layerparity.record.verdict import Outcome
from layerparity.report.answering import portrayed, rows_of
from layerparity.report.sentence import answer_of, markdown
from layerparity.run.steps import settings_to_judge
from layerparity.search.bench import KIND, Bench
from layerparity.search.strategies import STRATEGIES, SearchResult, choose
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.links import say_link

if TYPE_CHECKING:
    from layerparity.tracking.active import ActiveRun

_SHOWN = {
    "error_ratio": "R (reference)",
    "rel_l2": "rel L2 (golden)",
    "norm_ratio": "norm ratio (golden)",
}


@dataclass(frozen=True)
class Conclusion:
    """What a bisection ends with: the search, the answer, the guilty place and its causes."""

    result: SearchResult
    answer: Answer
    exit: Exit
    guilt: Guilt | None = None
    causes: Sequence[Cause] = ()
    comparison: Comparison | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return {
            "answer": asdict(self.answer),
            "guilt": self.guilt.to_dict() if self.guilt else None,
            "causes": [asdict(cause) for cause in self.causes],
            "steps": [asdict(step) for step in self.result.steps],
            "commands": [each for each in self.answer.next if not each.startswith(REMARK)],
        }


def bisect(config: Config) -> Exit:
    """Search, descend into the wrong place, keep it as a run and print it; return how it ends."""
    from layerparity.tracking.store import open_store

    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = Bench(config, store, golden)
    strategy = choose(config.job.strategy, bench)
    name = config.name or f"bisect-{golden[0].name}"
    console.say(f"golden: {golden[0].name}; strategy={strategy}")
    with store.start(name, KIND, bench.tags(strategy), {"strategy": strategy}) as active:
        bench.parent = active.id
        conclusion = conclude(bench, STRATEGIES[strategy](bench))
        if conclusion.comparison is not None:
            shown = _with_answer(conclusion.comparison, conclusion, bench)
            conclusion = replace(conclusion, comparison=shown)
        _log(active, conclusion)
    _print(conclusion, active)
    return conclusion.exit


def conclude(bench: Bench, result: SearchResult) -> Conclusion:
    """Descend into the place that was found, and say what is wrong there and why."""
    if result.place is None:
        return _nothing_wrong(bench, result)
    guilt, comparison = _descended(bench, result)
    if guilt is None:
        # The chain leaves rounding at a block that is right by itself.
        block = f"layers.{result.place}"
        answer = Answer(
            f"The accumulated error leaves rounding at {block}, but {block} alone is right",
            "the error is spread over the blocks before it, or comes from how they are joined",
            next=bench.scanning(),
        )
        return Conclusion(result, answer, Exit.INCONCLUSIVE, comparison=comparison)
    causes = likeliest(evidence_of(guilt, comparison, bench.config, bench.golden))
    answer = answer_of(
        guilt,
        causes,
        rows_of(guilt, comparison),
        bench.commands(guilt.layer, guilt.component, guilt.decoding),
        last=bool(result.note),
    )
    if result.note:
        answer = replace(answer, evidence=(*answer.evidence, result.note))
    return Conclusion(result, answer, Exit.FAILED, guilt, causes, comparison)


def _nothing_wrong(bench: Bench, result: SearchResult) -> Conclusion:
    verdict = result.comparison.verdict if result.comparison else None
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
    return Conclusion(result, answer, ending, comparison=result.comparison)


def _descended(bench: Bench, result: SearchResult) -> tuple[Guilt | None, Comparison]:
    """Return the component in a wrong block, from a run of it alone with everything observed."""
    place = result.place
    if not isinstance(place, int):
        assert result.guilt is not None, "a place outside the blocks was judged by local error"
        assert result.comparison is not None
        return result.guilt, result.comparison
    decoding = result.guilt is not None and result.guilt.decoding
    closer = bench.decoding(place) if decoding else bench.alone(place)
    guilt = descend(closer, place) if closer is not None else None
    if closer is not None and (guilt is not None or result.guilt is None):
        return guilt, closer
    assert result.guilt is not None
    assert result.comparison is not None
    if closer is None:
        return result.guilt, result.comparison
    note = "with every component observed the block passes: observing it changes what is computed"
    return replace(result.guilt, notes=(*result.guilt.notes, note)), result.comparison


def _with_answer(comparison: Comparison, conclusion: Conclusion, bench: Bench) -> Comparison:
    """Return the comparison of the guilty place as its report shows it: answer and portrait."""
    comparison.settings = settings_to_judge(bench.config)
    if conclusion.guilt is None:
        return comparison
    answered = replace(comparison, guilty=conclusion.guilt.called, answer=conclusion.answer)
    golden, candidate = (
        [bench.store.find(made.named)[0] for made in side.made]
        for side in (comparison.golden, comparison.candidate)
    )
    return portrayed(answered, golden, candidate, conclusion.guilt)


def _log(active: ActiveRun, conclusion: Conclusion) -> None:
    """Keep a conclusion in its run: the record, the text, the tags, and the report."""
    active.log_text(json.dumps(conclusion.to_dict(), indent=1), "bisection.json")
    text = markdown(conclusion.answer, conclusion.result.steps, conclusion.causes)
    active.log_text(text, "bisection.md")
    guilt = conclusion.guilt
    tags = {
        "verdict": conclusion.exit.name.lower(),
        "guilty": guilt.place if guilt else "",
        "cause": conclusion.causes[0].id if conclusion.causes else "",
        "mlflow.note.content": text,
    }
    active.set_tags(tags)
    if conclusion.comparison is not None:
        from layerparity.report.html import render_html

        active.log_text(conclusion.comparison.to_json(), "comparison.json")
        active.log_text(render_html(conclusion.comparison), "report.html")


def _print(conclusion: Conclusion, active: ActiveRun) -> None:
    """Print the steps, the sites of the guilty place, the answer and the links."""
    rows = [(s.asked, "wrong" if s.wrong else "right", s.told) for s in conclusion.result.steps]
    console.table("Steps", ("asked", "", "told"), rows)
    if conclusion.guilt is not None and conclusion.comparison is not None:
        _print_sites(conclusion.guilt, conclusion.comparison)
    console.say(f"\n{conclusion.answer.text}\n")
    if conclusion.comparison is not None:
        console.say(f"report: {active.link('artifacts/report.html')}")
        console.say(f"        {active.folder / 'report.html'}")
    say_link(active, active.connection.config)


def _print_sites(guilt: Guilt, comparison: Comparison) -> None:
    """Print the sites of the guilty place in the guilty phase, in forward order."""
    from layerparity.report.measures import numeral

    rows = []
    for local, row in rows_of(guilt, comparison).items():
        numbers = [numeral(row.metrics[n]) if n in row.metrics else "-" for n in _SHOWN]
        rows.append((local, row.outcome.value, *numbers, row.reason.partition(";")[0]))
    step = f", decode step {guilt.site.step}" if guilt.site and guilt.decoding else ""
    console.table(f"{guilt.stage}{step}", ("site", "outcome", *_SHOWN.values(), "reason"), rows)
