"""Run several commands one after the other, as one: golden, candidate, comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerparity.anatomy.site import overlap
from layerparity.ground import console, registry
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.program import program
from layerparity.making import typed_keys
from layerparity.ports.opening import open_backend
from layerparity.settings.config import Config, checked
from layerparity.settings.key import key

NAME = "sequence"
# What chooses the sequence itself, and so belongs to no step.
_OWN = ("job", "experiment")
_NOTHING = object()


@dataclass
class Settings:
    """conf/job/sequence.yaml: each step is a command's arguments, separated by spaces.

    ``without`` has, by the name of a backend, the words that stand in for ``backend=NAME`` on a
    machine that has nothing of it (`Affinity.is_absent`): what is there and broken fails.
    """

    name: str = NAME
    steps: list[str] = key([], "commands that an experiment runs one after the other")
    without: dict[str, str] = key({}, "words for backend=NAME where this machine lacks it, by NAME")


@dataclass(frozen=True)
class SharedKeys:
    """What stands beside the steps and goes to each: the experiment's keys, and what was typed.

    ``usual`` and ``chosen`` are the options by group without the experiment and with it; ``values``
    are the values it changed, by dotted key; ``given`` are the words of the command line.
    """

    usual: Mapping[str, str]
    chosen: Mapping[str, str]
    values: Mapping[str, Any]
    given: Sequence[str]


def run(config: Config) -> Exit:
    """Run the steps in this process; the first one that does not succeed ends the sequence.

    All steps are composed before the first one runs. An exception about a step that cannot be
    composed carries a note that names it.
    """
    if not config.job.steps:
        raise UserError("job=sequence has no steps: choose an experiment that lists some.")
    steps, lacks = _possible(config.job)
    shared, composed = _shared(config), []
    _refuse_between(steps, shared.given)
    commands = [_with_typed(step.split(), shared.given) for step in steps]
    for number, words in enumerate(commands, start=1):
        try:
            composed.append(_composed(words, shared))
        except Exception as error:
            error.add_note(f"Step {number} of {len(steps)} ({' '.join(words)})")
            raise
    for number, (words, each) in enumerate(zip(commands, composed, strict=True), start=1):
        console.say(f"\n[{number} of {len(steps)}] {program()} {' '.join(map(shlex.quote, words))}")
        if number in lacks:
            console.note(lacks[number][1])
        with typed_keys.step(words):
            ended: Exit = registry.load("jobs", each.job.name).run(each)
        if ended is not Exit.OK:
            break
    for changed, (word, _) in lacks.items():
        if changed < number:
            console.note(f"step {changed} was not {word}: this is no verdict on that backend")
    return ended


def _possible(asked: Settings) -> tuple[list[str], dict[int, tuple[str, str]]]:
    """Return the steps that this machine can run; of each changed one its word, and what to say."""
    steps, lacks = [], {}
    for number, step in enumerate(asked.steps, start=1):
        words = step.split()
        for place, word in enumerate(words):
            name = word.removeprefix("backend=")
            if name == word or name not in asked.without:
                continue
            fit = open_backend.affinity(name)
            if fit.is_absent:
                words[place] = asked.without[name]
                lacks[number] = (
                    word,
                    (
                        f"{fit.found}, so this step is another implementation, not {word}. "
                        f"For {word}, {fit.cure}"
                    ),
                )
        steps.append(" ".join(words))
    return steps, lacks


def _shared(config: Config) -> SharedKeys:
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    typed = HydraConfig.get().overrides.task
    given = [w for w in typed if _key(w) not in _OWN and not w.startswith("job.")]
    usual = _groups(compose("config", return_hydra_config=True).hydra)
    chosen = _groups(HydraConfig.get())
    values = _beyond(OmegaConf.structured(config), chosen)
    return SharedKeys(usual, chosen, values, given)


def _composed(words: Sequence[str], shared: SharedKeys) -> Any:
    """Return a step's configuration: the experiment's keys, over them the step's, then the typed.

    The step itself may choose an experiment, whose keys are the step's.
    """
    from hydra import compose
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from layerparity.settings.command_keys import as_meant

    words = as_meant(words)
    alone = compose("config", overrides=words, return_hydra_config=True)
    if alone.hydra.mode is RunMode.MULTIRUN:
        raise UserError("a step cannot be a sweep: run it as a command of its own.")
    if alone.job.name == NAME:
        raise UserError("a step cannot be a sequence: list its steps instead.")
    mine, named = _groups(alone.hydra), {_key(word) for word in words}
    own = {name for name in mine if name in named or mine[name] != shared.usual[name]}
    groups = {name: option for name, option in shared.chosen.items() if name not in own}
    given = [word for word in shared.given if word not in words]
    made = compose("config", overrides=[*_words(groups), *words, *given])
    # The values of an option mean nothing where the step chose another one.
    elsewhere = {name for name in own if mine[name] != shared.chosen.get(name)}
    settled = {*elsewhere, *_beyond(alone, mine)} | ({*named, *map(_key, shared.given)} - {*mine})
    for path, value in shared.values.items():
        if not any(overlap(path, each) for each in settled):
            OmegaConf.update(made, path, value, force_add=True)
    return checked(made)


def _refuse_between(steps: Sequence[str], given: Sequence[str]) -> None:
    """Raise UserError where a typed key would make alike what the steps compare."""
    for typed in map(_key, given):
        own = {word for step in steps for word in step.split() if _key(word) == typed}
        if len(own) > 1:
            raise UserError(
                f"{typed}= is what the steps differ in ({', '.join(sorted(own))})", "leave it out."
            )


def _with_typed(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a step's words, each replaced by what was typed for the same key."""
    typed = {_key(word): word for word in given}
    if "model.path" in typed:
        typed["model"] = typed["model.path"]
    return [typed.get(_key(word), word) for word in words]


def _beyond(made: Any, groups: Mapping[str, str]) -> dict[str, Any]:
    """Return the values, by dotted key, that a choice of groups alone does not give."""
    from hydra import compose
    from omegaconf import OmegaConf

    plain = compose("config", overrides=_words(groups))
    before = dict(_leaves(OmegaConf.to_container(plain, enum_to_str=True)))
    after = _leaves(OmegaConf.to_container(made, enum_to_str=True))
    return {key: value for key, value in after if before.get(key, _NOTHING) != value}


def _groups(hydra: Any) -> dict[str, str]:
    """Return the chosen option of each of our groups."""
    choices = dict(hydra.runtime.choices)
    return {
        name: option
        for name, option in choices.items()
        if "/" not in name and name not in _OWN and option is not None
    }


def _words(groups: Mapping[str, str]) -> list[str]:
    return [f"{name}={option}" for name, option in groups.items()]


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return every value by its dotted key, a list whole, without what chooses a sequence."""
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [
        leaf
        for key, inner in value.items()
        if prefix or key not in (*_OWN, "hydra")
        for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    ]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
