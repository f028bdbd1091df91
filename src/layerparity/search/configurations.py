"""Configurations: the fewest keys that part a configuration that is right from one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.record.verdict import Outcome
from layerparity.report.sentence import Step
from layerparity.search.bench import RunBench
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.links import say_link

KIND = "bisection"


@dataclass
class Trials:
    """Runs with some of the bad keys, the others as in the good configuration."""

    bench: RunBench
    good: Mapping[str, Any]
    bad: Mapping[str, Any]
    steps: list[Step] = field(default_factory=list)

    def fails(self, keys: frozenset[str]) -> bool:
        """Say whether a configuration with these of the bad keys is judged wrong.

        One that cannot run, or cannot be judged, does not count as wrong.
        """
        chosen = {key: self.bad[key] for key in sorted(keys) if key in self.bad}
        settings = {**{k: v for k, v in self.good.items() if k not in keys}, **chosen}
        asked = ", ".join(f"{key}={value}" for key, value in settings.items()) or "no key"
        console.say(f"\ntrial {len(self.steps) + 1}: {asked}")
        try:
            verdict = self.bench.trial(settings).verdict
        except UserError as error:
            self.steps.append(Step(asked, f"cannot run: {error}", wrong=False))
            return False
        wrong = verdict.outcome is Outcome.FAIL
        told = f"{verdict.outcome.value}" + (f" at {verdict.first_failure}" if wrong else "")
        self.steps.append(Step(asked, told, wrong))
        return wrong


def run(config: Config) -> Exit:
    """Return 1 and name the keys; raises UserError where the two do not part good from bad."""
    from layerparity.tracking.store import open_store

    good, bad = parsed(config.job.good, "good"), parsed(config.job.bad, "bad")
    keys = [key for key in {**good, **bad} if good.get(key) != bad.get(key)]
    if not keys:
        raise UserError("job.good and job.bad are the same: give keys that differ.")
    store = open_store(config.tracking)
    golden = store.find(config.golden or "latest", kind=RunKind.golden.value)
    bench = RunBench(config, store, golden)
    name = config.name or "bisect-configuration"
    params = {"good": str(good), "bad": str(bad)}
    tags = {"golden": " ".join(run.id for run in golden), "strategy": "ddmin"}
    with store.start(name, KIND, tags, params) as active:
        bench.parent = active.id
        trials = Trials(bench, good, bad)
        guilty = _minimal(keys, trials)
        words = [f"{key}={bad[key]}" if key in bad else f"{key} left out" for key in guilty]
        said = f"{' and '.join(words)} {'makes' if len(words) == 1 else 'make'} the difference."
        record = {"keys": list(guilty), "steps": [vars(step) for step in trials.steps]}
        active.log_text(json.dumps(record, indent=1), "bisection.json")
        active.log_text(_markdown(said, trials.steps), "bisection.md")
        active.set_tags({"guilty": " ".join(guilty), "mlflow.note.content": said})
    rows = [(s.asked, "wrong" if s.wrong else "right", s.told) for s in trials.steps]
    console.table("Trials", ("configuration", "", "told"), rows)
    console.say(f"{said} {len(trials.steps)} trials over {len(keys)} keys.")
    say_link(active, config.tracking)
    return Exit.FAILED


def parsed(given: object, which: str) -> dict[str, Any]:
    """Return the keys of a configuration with their values, from what ``job.good`` may hold.

    Raises UserError for a word that is no ``key=value``.
    """
    if given is None or isinstance(given, Mapping):
        return {str(key): value for key, value in (given or {}).items()}
    words = _words(given) if isinstance(given, str) else given
    found: dict[str, Any] = {}
    for word in words if isinstance(words, Sequence) else [words]:
        key, equals, value = str(word).partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"job.{which} holds '{word}', which is no key=value: "
                f"write 'job.{which}={{dtype:bfloat16,tp_degree:1}}'."
            )
        found[key.strip()] = _value(value)
    return found


def _words(text: str) -> list[str]:
    """Return the words of ``[a=1,b=[x,y]]``; what follows a comma and has no = goes on."""
    words: list[str] = []
    for piece in text.removeprefix("[").removesuffix("]").split(","):
        if words and "=" not in piece:
            words[-1] += f",{piece}"
        else:
            words.append(piece)
    return words


def _value(text: str) -> object:
    import yaml

    return yaml.safe_load(text)


def _minimal(keys: Sequence[str], trials: Trials) -> tuple[str, ...]:
    try:
        return minimal(keys, trials.fails)
    except ValueError as error:
        told = trials.steps[-1].told
        side = "job.good" if "without" in str(error) else "job.bad"
        how = "fails as well" if side == "job.good" else "does not fail"
        raise UserError(
            f"{side} {how} ({told}): give one configuration that passes and one that fails."
        ) from error


def _markdown(said: str, steps: Sequence[Step]) -> str:
    lines = [f"{n}. {step.asked}: {step.told}" for n, step in enumerate(steps, 1)]
    return f"# {said}\n\n" + "\n".join(lines) + "\n"


K = TypeVar("K")


def minimal(keys: Sequence[K], fails: Callable[[frozenset[K]], bool]) -> tuple[K, ...]:
    """Return keys of which every one is needed to fail, in the order given.

    ``fails`` is asked once for each set. The whole set must fail and the empty one must not: raises
    ValueError. The result is 1-minimal: without any one of its keys it no longer fails, though a
    smaller set elsewhere may. O(n^2) trials at worst, O(log n) where one key is to blame.
    The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
    Input" (IEEE TSE 28(2), 2002).
    """
    tried: dict[frozenset[K], bool] = {}

    def test(subset: Sequence[K]) -> bool:
        asked = frozenset(subset)
        if asked not in tried:
            tried[asked] = fails(asked)
        return tried[asked]

    if test(()):
        raise ValueError("it fails without any of the keys")
    if not test(keys):
        raise ValueError("it does not fail with all of the keys")
    kept, pieces = list(keys), 2
    while len(kept) >= 2:
        parts = _split(kept, pieces)
        reduced = _one_part(parts, test) or _all_but_one(parts, test)
        if reduced is None:
            if pieces >= len(kept):
                break
            pieces = min(len(kept), 2 * pieces)
            continue
        kept, pieces = reduced
    return tuple(kept)


Reduced = tuple[list[K], int]


def _one_part(parts: list[list[K]], test: Callable[[Sequence[K]], bool]) -> Reduced[K] | None:
    """Return the first part that fails alone, to be cut in two next."""
    return next(((part, 2) for part in parts if test(part)), None)


def _all_but_one(parts: list[list[K]], test: Callable[[Sequence[K]], bool]) -> Reduced[K] | None:
    """Return the first complement of a part that fails, its parts as fine as before."""
    for index in range(len(parts)):
        rest = [key for other, part in enumerate(parts) if other != index for key in part]
        if test(rest):
            return rest, max(len(parts) - 1, 2)
    return None


def _split(keys: list[K], pieces: int) -> list[list[K]]:
    """Return keys cut into ``pieces`` parts whose sizes differ by one at most."""
    size, longer = divmod(len(keys), pieces)
    parts, start = [], 0
    for index in range(pieces):
        end = start + size + (index < longer)
        parts.append(keys[start:end])
        start = end
    return [part for part in parts if part]
