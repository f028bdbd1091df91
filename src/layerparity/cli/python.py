"""The door from Python: the functions of ``import layerparity``, each over what its job runs.

Keys are those of a command: as its words (``"scope=single"``), or by name (``scope="single"``),
where two underscores stand for a dot (``model__path="/models/mine"``) and a mapping for several
keys of a group. What a job says is printed as a command prints it; ``contextlib.redirect_stdout``
silences it, and the logger ``layerparity`` hears it too. A user's mistake raises `UserError`, with
the message of the command line. Calls from several threads take turns.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.cli import caller, command, mlflow_variables
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.ground.quoting import word
from layerparity.ground.resources import shipped
from layerparity.making import typed_keys
from layerparity.record.exported import is_export
from layerparity.record.stored_run import Kept, StoredRun, from_folder
from layerparity.report.notebook import Bisection, Comparison, Run
from layerparity.settings import config as settings
from layerparity.settings.config import Config, What
from layerparity.settings.search_path import given_folders

if TYPE_CHECKING:
    from layerparity.tracking.store import Store

# What names a run: one that was made or opened, an id, its unique beginning, a name, or a folder.
Reference = Run | str | Path
_EACH = "for each of them, call this function once."


def run(*overrides: str, **keys: Any) -> Run:
    """Make a run, as ``python run.py`` with these keys does, or reuse one; return it.

    Raises UserError for a mistake in the keys, and where the run cannot be made.
    """
    with _job("run", overrides, keys) as config:
        from layerparity.making.make import make_run

        return Run([_stored(config, make_run(config).id)])


def compare(
    golden: Reference | None = None,
    candidate: Reference | None = None,
    *overrides: str,
    **keys: Any,
) -> Comparison:
    """Judge every site of a candidate, keep the verdict with its report, and return it.

    Without ``golden`` or ``candidate`` it is the newest one that can be compared. A comparison that
    fails is returned, too: its ``outcome`` says so. Raises UserError as the command does.
    """
    sides = {"golden": golden, "candidate": candidate}
    keys |= {name: side for name, side in sides.items() if side is not None}
    with _job("compare", overrides, keys) as config:
        if config.what is What.weights:
            raise UserError(
                "what=weights compares no runs", f"type it: {program()} job=compare what=weights"
            )
        kept: Kept = registry.load("jobs", "compare").compare(config)
        return Comparison(_stored(config, kept.run))


def bisect(
    *overrides: str,
    good: Mapping[str, Any] | None = None,
    bad: Mapping[str, Any] | None = None,
    strategy: str = "auto",
    **keys: Any,
) -> Bisection:
    """Find the first wrong block, the component in it and its likeliest cause, by further runs.

    With ``good`` and ``bad``, keys of a configuration that is right and of one that is wrong, find
    the fewest keys that make the difference. Raises UserError as the command does.
    """
    own = {"job__strategy": strategy, "job__good": good, "job__bad": bad}
    keys |= {name: value for name, value in own.items() if value not in (None, "auto")}
    with _job("bisect", overrides, keys) as config:
        kept: Kept = registry.load("jobs", "bisect").bisect(config)
        return Bisection(_stored(config, kept.run))


def open_run(reference: Reference, *overrides: str, **keys: Any) -> Run:
    """Return a stored run, or the finished runs of a sweep as one, by id, name or folder.

    A `Path` is a folder or an export outside of any store; ``"latest"`` is the newest finished run.
    Raises UserError where there is none, where it did not finish, and for a comparison.
    """
    with _job("run", overrides, keys) as config:
        parts = _found(reference, config)
        if parts[0].kind in (Comparison.KIND, Bisection.KIND):
            raise UserError(
                f"'{parts[0].name}' is a {parts[0].kind}",
                f"open it with open_{parts[0].kind}, or give a golden or a candidate run.",
            )
        return Run(parts)


def open_comparison(reference: Reference = "latest", *overrides: str, **keys: Any) -> Comparison:
    """Return a stored comparison by id, name or folder; without one, the newest.

    Raises UserError where there is none, and for a run that is no comparison.
    """
    with _job("run", overrides, keys) as config:
        return Comparison(_found(reference, config, Comparison.KIND)[0])


def open_bisection(reference: Reference = "latest", *overrides: str, **keys: Any) -> Bisection:
    """Return a stored bisection by id, name or folder; without one, the newest.

    Raises UserError where there is none, and for a run that is no bisection.
    """
    with _job("run", overrides, keys) as config:
        return Bisection(_found(reference, config, Bisection.KIND)[0])


def _found(reference: Reference, config: Config, kind: str | None = None) -> list[StoredRun]:
    """Return the runs that a reference names; a folder outside of a store opens no store."""
    if isinstance(reference, Run):
        return list(reference.parts)
    if isinstance(reference, Path) and reference.is_dir() and not is_export(reference):
        return [from_folder(reference.resolve())]
    if not isinstance(reference, str | Path) or reference == "":
        raise UserError(
            f"{reference!r} names no run",
            "Give its id, name or folder, or leave it out: the newest.",
        )
    words = str(reference.resolve() if isinstance(reference, Path) else reference)
    return _store(config).find(words, kind=kind)


def _stored(config: Config, run_id: str) -> StoredRun:
    stored = _store(config).get(run_id)
    assert stored is not None, "a run that was just made can be found"
    return stored


def _store(config: Config) -> Store:
    from layerparity.tracking.opening import open_store

    return open_store(config.tracking)


def _check_words(overrides: tuple[object, ...]) -> None:
    for each in overrides:
        if not isinstance(each, str):
            raise UserError(
                f"{each!r} is no word of a command", "give it by its key, as in layer=3"
            )


@contextmanager
def _job(job: str, overrides: tuple[str, ...], keys: Mapping[str, Any]) -> Iterator[Config]:
    """Yield what the keys of a call are composed to, with all set up for the job to run.

    A UserError leaves without the frames of what found it: its message is all there is to know.
    """
    try:
        with caller.untouched():
            _check_words(overrides)
            words = [*overrides, *(each for key in keys for each in _words(key, keys[key]))]
            words += mlflow_variables.words_for(words)
            words = command.as_meant(words)
            with _composing(words, job) as config, command.plain_errors():
                typed_keys.refuse_unread(config, registry.load("jobs", job))
                yield config
    except UserError as error:
        raise error.with_traceback(None) from None


@contextmanager
def _composing(words: list[str], job: str) -> Iterator[Config]:
    """Compose the words for a job, with Hydra ready to compose what its steps need."""
    from hydra import compose, initialize_config_dir

    command.check_overrides(words, False, given_folders(None, words), _EACH)
    for each in words:
        key = each.partition("=")[0].lstrip("+~")
        if key == "job" and each != f"job={job}":
            raise UserError(f"{each} is not what is called", f"type it: {program()} {each}")
        if key.startswith("hydra.") and key != "hydra.searchpath":
            raise UserError(f"{each} is for the command line", "leave it out.")
    # An experiment chooses a job; where one is asked for by name, that one stands.
    asked = words if job == "run" else [f"job={job}", *words]
    folder = str(shipped("conf").absolute())
    with initialize_config_dir(version_base="1.3", config_dir=folder), typed_keys.step(words):
        with command.plain_errors():
            try:
                config = settings.checked(compose("config", overrides=list(dict.fromkeys(asked))))
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                mistake = command.blame(asked)
                if mistake is None:
                    raise
                raise mistake from error
        if config.dry_run:
            raise UserError("dry_run=true is for the command line", "leave it out.")
        if config.job.name != job:
            raise UserError(
                f"These keys ask for job={config.job.name}, and this call makes one {job}",
                f"call run(), compare() and bisect() one by one, or type it: {program()} "
                f"{shlex.join(words)}",
            )
        yield config


def _words(name: str, value: Any) -> Iterator[str]:
    """Yield the words of a command that give a key this value."""
    key = name.replace("__", ".")
    if isinstance(value, Mapping) and any(
        each.startswith(f"{key}.") for each in settings.every_key()
    ):
        for inner, one in value.items():
            yield from _words(f"{key}.{inner}", one)
        return
    if isinstance(value, Run):
        value = value.reference
    yield word(key, str(value) if isinstance(value, Path) else value)
