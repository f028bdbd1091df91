"""Bisect: find the first wrong block, the component in it and its likeliest cause; or the keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from layerparity import console, registry
from layerparity.bisect.descend import descend
from layerparity.bisect.guilt import Guilt
from layerparity.bisect.sentence import markdown, numbers_text, sentence
from layerparity.bisect.strategies.base import Found, Strategy
from layerparity.causes.base import Cause, likeliest
from layerparity.config import Config, RunKind
from layerparity.errors import Exit, UserError
from layerparity.jobs._bench import RunBench
from layerparity.jobs._evidence import evidence_of
from layerparity.verdict import Outcome

if TYPE_CHECKING:
    from layerparity.compare.comparison import Comparison
    from layerparity.tracking.active import ActiveRun

KIND = "bisection"
AUTO = "auto"
STRATEGIES = "bisect.strategies"


@dataclass
class Settings:
    """conf/job/bisect.yaml.

    ``strategy`` is auto, scan, binary or inject. ``good`` and ``bad`` are the keys of a
    configuration that agrees with the golden and of one that does not: a map
    ``{dtype:float32,threads:1}``, or ``dtype=float32`` words as a list or in one text.
    """

    name: str = "bisect"
    strategy: str = AUTO
    good: Any = None
    bad: Any = None


@dataclass(frozen=True)
class Answer:
    """What a bisection ends with: how it was found, the guilty place, its causes and commands."""

    found: Found
    said: str
    exit: Exit
    guilt: Guilt | None = None
    causes: Sequence[Cause] = ()
    comparison: Comparison | None = None
    commands: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return {
            "sentence": self.said,
            "guilt": self.guilt.to_dict() if self.guilt else None,
            "causes": [asdict(cause) for cause in self.causes],
            "steps": [asdict(step) for step in self.found.steps],
            "commands": list(self.commands),
        }


def run(config: Config) -> Exit:
    """Bisect the model, or the configuration where ``job.good`` or ``job.bad`` is given."""
    from layerparity.tracking.store import open_store

    if config.job.good or config.job.bad:
        from layerparity.jobs import _configurations

        return _configurations.run(config)
    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = RunBench(config, store, golden)
    strategy = _strategy(config.job.strategy, bench)
    name = config.name or f"bisect-{golden[0].name}"
    tags = {"golden": " ".join(run.id for run in golden), "strategy": strategy.name}
    console.say(f"golden: {golden[0].name}; strategy={strategy.name}")
    with store.start(name, KIND, tags, {"strategy": strategy.name}) as active:
        bench.parent = active.id
        answer = _answer(bench, strategy.find(bench))
        _log(active, answer)
    _say(answer, active)
    return answer.exit


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


def _answer(bench: RunBench, found: Found) -> Answer:
    """Descend into the place that was found, and say what is wrong there and why."""
    if found.place is None:
        return _nothing(found)
    guilt, comparison = _descended(bench, found)
    if guilt is None:
        block = f"layers.{found.place}"
        said = (
            f"The accumulated error leaves rounding at {block}, but {block} alone is right: the "
            "error is spread over the blocks before it, or comes from how they are joined. "
            "job.strategy=scan judges every block alone."
        )
        return Answer(found, said, Exit.INCONCLUSIVE, comparison=comparison)
    evidence = evidence_of(guilt, comparison, bench.config, bench.golden)
    causes = likeliest(evidence)
    said = sentence(guilt, causes, last=bool(found.note))
    commands = bench.commands(guilt.layer, guilt.component, guilt.decoding)
    said += f" Note: {found.note}." if found.note else ""
    return Answer(found, said, Exit.FAILED, guilt, causes, comparison, commands)


def _nothing(found: Found) -> Answer:
    said = "Nothing is wrong: no block, and nothing outside the blocks, leaves rounding."
    verdict = found.comparison.verdict if found.comparison else None
    if verdict is None or verdict.outcome is Outcome.PASS:
        return Answer(found, said, Exit.OK, comparison=found.comparison)
    said = "Nothing fails, but not everything could be judged: job=compare lists what was not."
    return Answer(found, said, Exit.INCONCLUSIVE, comparison=found.comparison)


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
    from dataclasses import replace

    return replace(guilt, notes=(*guilt.notes, note))


def _log(active: ActiveRun, answer: Answer) -> None:
    active.log_text(json.dumps(answer.to_dict(), indent=1), "bisection.json")
    text = markdown(answer.said, answer.found.steps, answer.causes, answer.commands)
    active.log_text(text, "bisection.md")
    guilt = answer.guilt
    tags = {
        "verdict": answer.exit.name.lower(),
        "guilty": guilt.place if guilt else "",
        "cause": answer.causes[0].id if answer.causes else "",
        "mlflow.note.content": text,
    }
    active.set_tags(tags)
    if answer.comparison is not None:
        from layerparity.compare.report.html import render_html

        active.log_text(answer.comparison.to_json(), "comparison.json")
        active.log_text(render_html(answer.comparison), "report.html")


def _say(answer: Answer, active: ActiveRun) -> None:
    steps = [
        (step.asked, "wrong" if step.wrong else "right", step.told) for step in answer.found.steps
    ]
    console.table("Steps", ("asked", "", "told"), steps)
    if answer.guilt is not None and answer.comparison is not None:
        _table(answer.guilt, answer.comparison)
    console.say(answer.said)
    for cause in answer.causes[1:4]:
        console.say(f"  or ({cause.confidence:.0%}) {cause.sentence}")
    if answer.commands:
        console.say("reproduce it alone:\n  " + "\n  ".join(answer.commands))
    console.say(f"{active.name}  {active.id}\n{active.url}")


def _table(guilt: Guilt, comparison: Comparison) -> None:
    """Print the sites of the guilty place in the guilty phase."""
    rows = []
    for row in comparison.rows:
        here = row.site.layer == guilt.layer and (
            guilt.layer is not None or row.site.path == guilt.component
        )
        step = guilt.site is None or (row.site.phase, row.site.step) == (
            guilt.site.phase,
            guilt.site.step,
        )
        if here and step:
            why = row.reason.partition(";")[0]
            rows.append((str(row.site), row.outcome.value, numbers_text(row), why))
    console.table(guilt.stage, ("site", "outcome", "numbers", "reason"), rows)
