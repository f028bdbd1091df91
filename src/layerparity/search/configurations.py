"""Find the fewest keys that tell a configuration that is right from one that is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.record.stored_run import Kept
from layerparity.record.verdict import Outcome
from layerparity.report.headline import headline, outcome_text
from layerparity.report.search import Step
from layerparity.search.bench import KIND, Bench
from layerparity.search.ddmin import NoDifferenceError, minimal
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.links import say_link


@dataclass
class KeyTrials:
    """Runs with some of the bad keys, the others as in the good configuration."""

    bench: Bench
    good: Mapping[str, Any]
    bad: Mapping[str, Any]
    steps: list[Step] = field(default_factory=list)

    def fails(self, keys: frozenset[str]) -> bool:
        """Say whether a configuration with these of the bad keys is judged wrong.

        One that cannot run, or cannot be judged, does not count as wrong; nor is it called right.
        Raises UserError where that one is ``job.good``, which all others are held against.
        """
        chosen = {key: self.bad[key] for key in sorted(keys) if key in self.bad}
        settings = {**{k: v for k, v in self.good.items() if k not in keys}, **chosen}
        asked = ", ".join(f"{key}={value}" for key, value in settings.items()) or "no key"
        console.say(f"\ntrial {len(self.steps) + 1}: {asked}")
        step = self._step(settings, asked)
        self.steps.append(step)
        if not keys and not step.judged:
            raise _not_judged("good", step)
        return step.wrong

    def _step(self, settings: Mapping[str, Any], asked: str) -> Step:
        """Run and judge one configuration."""
        try:
            verdict = self.bench.trial(settings)
        except UserError as error:
            return Step(asked, f"cannot run: {error}", wrong=False, judged=False)
        if verdict.outcome is Outcome.INCONCLUSIVE:
            return Step(asked, headline(verdict), wrong=False, judged=False)
        return Step(asked, outcome_text(verdict), verdict.outcome is Outcome.FAIL)

    @property
    def doubt(self) -> str:
        """Say what trials that were not judged leave open, in a sentence; empty for nothing."""
        open_ = [step for step in self.steps if not step.judged]
        if not open_:
            return ""
        which = "1 trial was" if len(open_) == 1 else f"{len(open_)} trials were"
        return (
            f"{which} not judged, and so called neither wrong nor right: fewer of these keys, or "
            f"others, may be enough ({open_[0].asked}: {open_[0].told})."
        )


def bisect(config: Config) -> Kept:
    """Name the keys of ``job.bad`` that make it fail where ``job.good`` passes; it ends as FAILED.

    Raises UserError where the two do not differ, or both pass, or both fail.
    """
    from layerparity.tracking.opening import open_store

    good, bad = parse_keys(config.job.good, "good"), parse_keys(config.job.bad, "bad")
    keys = [key for key in {**good, **bad} if good.get(key) != bad.get(key)]
    if not keys:
        raise UserError("job.good and job.bad are the same: give keys that differ.")
    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = Bench(config, store, golden)
    name = config.name or "bisect-configuration"
    params = {"good": str(good), "bad": str(bad)}
    with store.start(name, KIND, bench.tags("ddmin"), params) as active:
        bench.parent = active.id
        trials = KeyTrials(bench, good, bad)
        guilty = _guilty(keys, trials)
        words = [f"{key}={bad[key]}" if key in bad else f"{key} left out" for key in guilty]
        said = f"{' and '.join(words)} {'makes' if len(words) == 1 else 'make'} the difference."
        said = f"{said} {trials.doubt}".rstrip()
        record = {"keys": list(guilty), "steps": [asdict(step) for step in trials.steps]}
        active.log_text(json.dumps(record, indent=1), "bisection.json")
        lines = [f"{n}. {step.asked}: {step.told}" for n, step in enumerate(trials.steps, 1)]
        active.log_text("\n".join([f"# {said}", "", *lines, ""]), "bisection.md")
        active.set_tags({"guilty": " ".join(guilty), "mlflow.note.content": said})
    rows = [(s.asked, _called(s), s.told) for s in trials.steps]
    console.table("Trials", ("configuration", "", "told"), rows)
    console.say(f"{said} {len(trials.steps)} trials over {len(keys)} keys.")
    say_link(active, config.tracking)
    return Kept(Exit.FAILED, active.id)


def _guilty(keys: Sequence[str], trials: KeyTrials) -> tuple[str, ...]:
    """Return the fewest keys that fail. Raises UserError where they make no difference."""
    try:
        return minimal(keys, trials.fails)
    except NoDifferenceError as error:
        if not error.fails and not trials.steps[-1].judged:
            raise _not_judged("bad", trials.steps[-1]) from error
        side, how = ("good", "fails as well") if error.fails else ("bad", "does not fail")
        raise UserError(
            f"job.{side} {how} ({trials.steps[-1].told}): give one configuration that passes and "
            "one that fails."
        ) from error


def _not_judged(which: str, step: Step) -> UserError:
    """Return the refusal of one of the two configurations that was not judged."""
    return UserError(
        f"job.{which} could not be judged ({step.told})",
        "mend what is lacking, or use tolerance=fixed, which needs no floor.",
    )


def _called(step: Step) -> str:
    if not step.judged:
        return "not judged"
    return "wrong" if step.wrong else "right"


def parse_keys(given: object, which: str) -> dict[str, Any]:
    """Return the keys of a configuration with their values, from what ``job.good`` may hold.

    Raises UserError for a word that is no ``key=value``.
    """
    import yaml

    if given is None or isinstance(given, Mapping):
        return {str(key): value for key, value in (given or {}).items()}
    words = _words(given) if isinstance(given, str) else given
    values: dict[str, Any] = {}
    for word in words if isinstance(words, Sequence) else [words]:
        key, equals, value = str(word).partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"job.{which} holds '{word}', which is no key=value: "
                f"write 'job.{which}={{dtype:bfloat16,tp_degree:1}}'."
            )
        values[key.strip()] = yaml.safe_load(value)
    return values


def _words(text: str) -> list[str]:
    """Return the words of ``[a=1,b=[x,y]]``; what follows a comma and has no = goes on."""
    words: list[str] = []
    for piece in text.removeprefix("[").removesuffix("]").split(","):
        if words and "=" not in piece:
            words[-1] += f",{piece}"
        else:
            words.append(piece)
    return words
