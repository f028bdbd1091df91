"""Steps: runs that a job makes as its own, from the keys of a command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layerparity.config import Config
from layerparity.errors import UserError
from layerparity.jobs import _given, _keep
from layerparity.quoting import typed
from layerparity.sweep import PARENT_VARIABLE

if TYPE_CHECKING:
    from layerparity.tracking.store import Store
    from layerparity.tracking.stored import StoredRun

Settings = dict[str, Any]


def make(store: Store, parent: str, settings: Settings) -> StoredRun:
    """Make a run with these keys under a parent, or reuse one. Raises UserError where it cannot."""
    from layerparity.jobs import run

    config = composed({**settings, "reuse": True})
    with _given.step(()), _under(parent):
        made = store.get(run.make(config))
    assert made is not None, "a run that was just made can be found"
    return made


def composed(settings: Settings) -> Config:
    """Return the configuration of a ``job=run`` with these keys. Raises UserError for misfits."""
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = [shlex.split(typed(key, value))[0] for key, value in settings.items()]
    try:
        made = OmegaConf.to_object(compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        why = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"These keys do not go together: {' '.join(words)} ({why})") from error
    assert isinstance(made, Config)
    return made


def own_settings(config: Config) -> Settings:
    """Return the keys of a command that differ from the defaults; its job is left out."""
    from layerparity.again import settings_of

    return settings_of(_keep.params(config))


def stored_settings(run: StoredRun) -> Settings:
    """Return the keys that made a stored run. Raises UserError where it did not keep them."""
    import yaml

    from layerparity.again import settings_of

    path = run.file("config.yaml")
    if not path.is_file():
        raise UserError(f"Run {run.name} kept no config.yaml: make a golden run with this version.")
    return settings_of(yaml.safe_load(path.read_text(encoding="utf-8")))


def reference(runs: Sequence[StoredRun]) -> str:
    """Return what names runs on a command line: an id, the sweep's id, or a folder."""
    if len(runs) > 1 and runs[0].parent:
        return runs[0].parent
    return runs[0].id or str(runs[0].folder)


def command(settings: Settings) -> str:
    """Return the command line that has these keys."""
    return " ".join(["python run.py", *(typed(key, value) for key, value in settings.items())])


@contextmanager
def _under(parent: str) -> Iterator[None]:
    """Let runs be made as children of a parent."""
    before = os.environ.get(PARENT_VARIABLE)
    os.environ[PARENT_VARIABLE] = parent
    try:
        yield
    finally:
        os.environ.pop(PARENT_VARIABLE)
        if before is not None:
            os.environ[PARENT_VARIABLE] = before
