"""Bisect: find the first wrong block, the component in it and its likeliest cause; or the keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from layerparity.ground import console, registry
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.descend import descend
from layerparity.judge.evidence import evidence_of
from layerparity.judge.guilt import Guilt
from layerparity.mistakes.catalogue import likeliest
from layerparity.mistakes.cause import Cause
from layerparity.record.comparison import REMARK, Answer
from layerparity.record.verdict import Outcome
from layerparity.report.answering import portrayed, rows_of
from layerparity.report.sentence import answer_of, markdown
from layerparity.search.bench import RunBench
from layerparity.search.strategies.base import Found, Strategy
from layerparity.settings.config import Config, RunKind
from layerparity.settings.key import key
from layerparity.tracking.links import say_link

if TYPE_CHECKING:
    from layerparity.record.comparison import Comparison
    from layerparity.tracking.active import ActiveRun

KIND = "bisection"
AUTO = "auto"
STRATEGIES = "search.strategies"
_SHOWN = {
    "error_ratio": "R (reference)",
    "rel_l2": "rel L2 (golden)",
    "norm_ratio": "norm ratio (golden)",
}


@dataclass
class Settings:
    """conf/job/bisect.yaml.

    ``strategy`` is auto, scan, binary or inject. ``good`` and ``bad`` are the keys of a
    configuration that agrees with the golden and of one that does not: a map
    ``{dtype:float32,threads:1}``, or ``dtype=float32`` words as a list or in one text.
    """

    name: str = "bisect"
    strategy: str = key(AUTO, "how to look for the block: auto, scan, binary or inject")
    good: Any = key(None, "keys of a configuration that is right: {dtype:float32}")
    bad: Any = key(None, "keys of a configuration that is wrong: {dtype:bfloat16,threads:1}")


@dataclass(frozen=True)
class Ended:
    """What a bisection ends with: how it was found, the answer, the guilty place, its causes."""

    found: Found
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
            "steps": [asdict(step) for step in self.found.steps],
            "commands": [each for each in self.answer.next if not each.startswith(REMARK)],
        }


def run(config: Config) -> Exit:
    """Bisect the model, or the configuration where ``job.good`` or ``job.bad`` is given."""
    from layerparity.tracking.store import open_store

    if config.job.good or config.job.bad:
        from layerparity.search import configurations

        return configurations.run(config)
    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = RunBench(config, store, golden)
    strategy = _strategy(config.job.strategy, bench)
    name = config.name or f"bisect-{golden[0].name}"
    tags = {"golden": " ".join(run.id for run in golden), "strategy": strategy.name}
    console.say(f"golden: {golden[0].name}; strategy={strategy.name}")
    with store.start(name, KIND, tags, {"strategy": strategy.name}) as active:
        bench.parent = active.id
        ended = _ended(bench, strategy.find(bench))
        if ended.comparison is not None:
            ended = replace(ended, comparison=_reported(ended.comparison, ended, bench))
        _log(active, ended)
    _say(ended, active)
    return ended.exit


def _strategy(name: str, bench: RunBench) -> Strategy:
    """Return a strategy by name; auto is scan where the golden has every block's input."""
    known = registry.names(STRATEGIES)
    if name == AUTO:
        name = "scan" if bench.holds_inputs else "binary"
    elif name not in known:
        raise UserError(f"job.strategy={name} is unknown. Known: {AUTO}, {', '.join(known)}.")
    if name in ("scan", "inject") and not bench.holds_inputs:
        raise UserError(
            f"job.strategy={name} feeds every block from the golden, which lacks some inputs: make "
            "one with capture=default, or use job.strategy=binary."
        )
    strategy: Strategy = registry.load(STRATEGIES, name).STRATEGY
    return strategy


def _ended(bench: RunBench, found: Found) -> Ended:
    """Descend into the place that was found, and say what is wrong there and why."""
    if found.place is None:
        return _nothing(bench, found)
    guilt, comparison = _descended(bench, found)
    if guilt is None:
        return Ended(found, _spread(bench, found), Exit.INCONCLUSIVE, comparison=comparison)
    causes = likeliest(evidence_of(guilt, comparison, bench.config, bench.golden))
    answer = answer_of(
        guilt,
        causes,
        rows_of(guilt, comparison),
        bench.commands(guilt.layer, guilt.component, guilt.decoding),
        last=bool(found.note),
    )
    if found.note:
        answer = replace(answer, evidence=(*answer.evidence, found.note))
    return Ended(found, answer, Exit.FAILED, guilt, causes, comparison)


def _spread(bench: RunBench, found: Found) -> Answer:
    """Return what to say where the chain leaves rounding at a block that is right by itself."""
    block = f"layers.{found.place}"
    return Answer(
        f"The accumulated error leaves rounding at {block}, but {block} alone is right",
        "the error is spread over the blocks before it, or comes from how they are joined",
        next=bench.scanning(),
    )


def _nothing(bench: RunBench, found: Found) -> Ended:
    if found.doubt:
        where = "Nothing fails, but not every block could be judged"
        answer = Answer(where, evidence=(found.doubt,), next=bench.scanning())
        return Ended(found, answer, Exit.INCONCLUSIVE, comparison=found.comparison)
    verdict = found.comparison.verdict if found.comparison else None
    if verdict is None or verdict.outcome is Outcome.PASS:
        where = "Nothing is wrong: no block, and nothing outside the blocks, leaves rounding"
        return Ended(found, Answer(where), Exit.OK, comparison=found.comparison)
    where = "Nothing fails, but not everything could be judged: job=compare lists what was not"
    return Ended(found, Answer(where), Exit.INCONCLUSIVE, comparison=found.comparison)


def _descended(bench: RunBench, found: Found) -> tuple[Guilt | None, Comparison]:
    """Return the component in a wrong block, from a run of it alone with everything observed."""
    place = found.place
    if not isinstance(place, int):
        assert found.guilt is not None, "a place outside the blocks was judged by local error"
        assert found.comparison is not None
        return found.guilt, found.comparison
    decoding = found.guilt is not None and found.guilt.decoding
    closer = bench.decoding(place) if decoding else bench.alone(place)
    guilt = descend(closer, place) if closer is not None else None
    if closer is not None and (guilt is not None or found.guilt is None):
        return guilt, closer
    assert found.guilt is not None
    assert found.comparison is not None
    if closer is None:
        return found.guilt, found.comparison
    note = "with every component observed the block passes: observing it changes what is computed"
    return _noting(found.guilt, note), found.comparison


def _noting(guilt: Guilt, note: str) -> Guilt:
    return replace(guilt, notes=(*guilt.notes, note))


def _reported(comparison: Comparison, ended: Ended, bench: RunBench) -> Comparison:
    """Return the comparison of the guilty place as its report shows it: answer and portrait."""
    from layerparity.jobs.compare import settings_to_judge

    comparison.settings = settings_to_judge(bench.config)
    if ended.guilt is None:
        return comparison
    told = replace(comparison, guilty=ended.guilt.called, answer=ended.answer)
    golden, candidate = (
        [bench.store.find(made.named)[0] for made in side.made]
        for side in (comparison.golden, comparison.candidate)
    )
    return portrayed(told, golden, candidate, ended.guilt)


def _log(active: ActiveRun, ended: Ended) -> None:
    active.log_text(json.dumps(ended.to_dict(), indent=1), "bisection.json")
    text = markdown(ended.answer, ended.found.steps, ended.causes)
    active.log_text(text, "bisection.md")
    guilt = ended.guilt
    tags = {
        "verdict": ended.exit.name.lower(),
        "guilty": guilt.place if guilt else "",
        "cause": ended.causes[0].id if ended.causes else "",
        "mlflow.note.content": text,
    }
    active.set_tags(tags)
    if ended.comparison is not None:
        from layerparity.report.html import render_html

        active.log_text(ended.comparison.to_json(), "comparison.json")
        active.log_text(render_html(ended.comparison), "report.html")


def _say(ended: Ended, active: ActiveRun) -> None:
    steps = [
        (step.asked, "wrong" if step.wrong else "right", step.told) for step in ended.found.steps
    ]
    console.table("Steps", ("asked", "", "told"), steps)
    if ended.guilt is not None and ended.comparison is not None:
        _table(ended.guilt, ended.comparison)
    console.say(f"\n{ended.answer.text}\n")
    if ended.comparison is not None:
        console.say(f"report: {active.link('artifacts/report.html')}")
        console.say(f"        {active.folder / 'report.html'}")
    say_link(active, active.connection.config)


def _table(guilt: Guilt, comparison: Comparison) -> None:
    """Print the sites of the guilty place in the guilty phase, in forward order."""
    from layerparity.report.measures import numeral

    rows = []
    for local, row in rows_of(guilt, comparison).items():
        numbers = [numeral(row.metrics[n]) if n in row.metrics else "-" for n in _SHOWN]
        rows.append((local, row.outcome.value, *numbers, row.reason.partition(";")[0]))
    step = f", decode step {guilt.site.step}" if guilt.site and guilt.decoding else ""
    console.table(f"{guilt.stage}{step}", ("site", "outcome", *_SHOWN.values(), "reason"), rows)
