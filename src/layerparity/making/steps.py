"""Make the runs that a job needs, from the keys of a command, and name them on a command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.ground.quoting import typed, word
from layerparity.making import own_process, typed_keys, write
from layerparity.making.sweep import PARENT_VARIABLE
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.folder import CONFIG
from layerparity.settings.config import Config, ScopeKind, checked

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

Settings = dict[str, Any]
_PORT = "port._target_"
# Keys that name code: a port of one's own, and what ours import and where they look for it.
_CODE = (_PORT, "port.model", "port.path")
# The keys, by their groups, that say what a run computes, on whatever machine it is.
COMPUTATION = (
    "attn_implementation",
    "backend",
    "capture",
    "device_map",
    "dtype",
    "experts_implementation",
    "max_memory",
    "model",
    "moe_ep_degree",
    "port",
    "reference",
    "threads",
    "tp_degree",
)
# Notes that a step of this command said: the next one says only what is new.
_noted: set[str] = set()


def make(store: Store, parent: str, settings: Settings, alone: bool = False) -> StoredRun:
    """Make a run with these keys under a parent, if it has one, or reuse one; say so in a line.

    ``alone`` says that the steps of the job differ in their keys: what a process can hold only once
    is then run in one of its own. Raises UserError where it cannot.
    """
    from layerparity.making.make import make_run

    settings = {**settings, "reuse": True}
    config = composed(settings)
    where = {
        ScopeKind.full: "the whole model",
        ScopeKind.range: f"layers {config.start} to {config.end}",
        ScopeKind.single: config.component or f"layer {config.layer}",
    }[config.scope.kind]
    what = f"{config.kind.value} run of {where}, {config.feed.value}, capture={config.capture.name}"
    began, before = time.monotonic(), store.counted()
    in_its_own = alone and open_backend.abilities(config).settings_once
    with brief(what), typed_keys.step(()), _under(parent or None):
        run_id = own_process.make(settings) if in_its_own else make_run(config).id
        stored = store.get(run_id)
    assert stored is not None, "a run that was just made can be found"
    spent = time.monotonic() - began
    how = "reused" if stored.sequence <= before else f"{spent:.1f} s"
    console.say(f"{what}: {stored.name} {stored.id[:8]}, {how}")
    return stored


def forget_notes() -> None:
    """Begin another command, whose steps say each note anew."""
    _noted.clear()


def brief(title: str) -> AbstractContextManager[None]:
    """Return a block in which only notes, once each, and progress under a title are shown."""
    return console.brief(title, _noted)


def composed(settings: Settings) -> Config:
    """Return the configuration of a ``job=run`` with these keys. Raises UserError for misfits."""
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    words = [word(key, value) for key, value in settings.items()]
    try:
        return checked(compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        why = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"These keys do not go together: {' '.join(words)} ({why})") from error


def own_settings(config: Config) -> Settings:
    """Return the keys of a command that differ from the defaults; its job is left out."""
    from layerparity.settings.command_keys import settings_of

    return settings_of(write.params(config))


def judging_settings(config: Config) -> Settings:
    """Return what a command sets of how to judge, and of where runs are kept."""
    own = own_settings(config)
    return {k: v for k, v in own.items() if k.partition(".")[0] in ("tolerance", "tracking")}


def settings_to_judge(config: Config) -> Settings:
    """Return `judging_settings`, the tolerance always among them."""
    return {"tolerance": config.tolerance.name, **judging_settings(config)}


def stored_settings(run: StoredRun, asked: Config) -> Settings:
    """Return the keys of what a stored run computed, to run it again for a command.

    The folder may be somebody else's: it may name this package's ports, or the one that the command
    itself names, and no file or folder but the model's. Raises UserError for another port, and
    where the run kept no keys.
    """
    from layerparity.settings.command_keys import settings_of

    config = run.files.read_config()
    if not config:
        raise UserError(f"Run {run.name} kept no {CONFIG}: make a golden run with this version.")
    settings = settings_of(config)
    cure = "make a golden of all components yourself with {} kind=golden capture=components, and "
    refuse_code(run, settings, asked, cure + "name it with golden=")
    # Not where anything is kept or read.
    return {k: v for k, v in settings.items() if k.lstrip("+").partition(".")[0] in COMPUTATION}


def refuse_code(run: StoredRun, settings: Settings, asked: Config, cure: str) -> None:
    """Raise UserError where a stored run's keys name a port that the command does not.

    ``cure`` has ``{}`` for the word that names the port.
    """
    mine = open_port.keys_of(asked.port)
    named = {key.lstrip("+"): value for key, value in settings.items()}
    for name in _CODE:
        code = named.get(name)
        if code not in (None, [], mine.get(name.partition(".")[2])):
            what = f"the port {code}" if name == _PORT else f"{name}={code}"
            raise UserError(
                f"Run {run.name} was made by {what}. A port is code, and only a command may name "
                f"it: {cure.format(typed(name, code))}."
            )


def reference(runs: Sequence[StoredRun]) -> str:
    """Return what names runs on a command line: an id, the sweep's id, or a folder."""
    if len(runs) > 1 and runs[0].parent:
        return runs[0].parent
    return runs[0].id or str(runs[0].folder)


def command(settings: Settings) -> str:
    """Return the command line that has these keys."""
    return " ".join([program(), *(typed(key, value) for key, value in settings.items())])


@contextmanager
def _under(parent: str | None) -> Iterator[None]:
    """Let runs be made as children of a parent, or of none."""
    before = os.environ.pop(PARENT_VARIABLE, None)
    try:
        if parent is not None:
            os.environ[PARENT_VARIABLE] = parent
        yield
    finally:
        os.environ.pop(PARENT_VARIABLE, None)
        if before is not None:
            os.environ[PARENT_VARIABLE] = before
