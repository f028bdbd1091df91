"""Early: what can be refused from the command and config.json, before seconds of imports."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

from layerparity.anatomy.family import family_of
from layerparity.ground import console
from layerparity.machine.memory import refuse_small_limits
from layerparity.model.resolve import open_checkpoint
from layerparity.run import open_backend, open_port
from layerparity.run.scope import num_layers_of, scope_of
from layerparity.settings.config import Config, RunKind

if TYPE_CHECKING:
    from layerparity.tracking.store import Store

LATEST = "latest"


def refuse(config: Config) -> None:
    """Raise UserError for limits too small, a scope the model lacks, keys the port does not take.

    Imports none of torch, transformers, torch_xla and mlflow.
    """
    refuse_small_limits()
    model = open_checkpoint(config.model).config
    num_layers = num_layers_of(model)
    scope_of(config, num_layers, family_of(str(model.get("model_type"))))
    open_port.check(config.port, config, num_layers)


def settle_kind(config: Config) -> None:
    """Replace kind=auto by what the backend makes where nobody says."""
    if config.kind is RunKind.auto:
        config.kind = open_backend.abilities(config).kind


def refuse_unknown_golden(config: Config, store: Store) -> None:
    """Raise UserError where the run is to be fed by a golden run that is not in the store."""
    reference = _golden(config)
    if reference is not None and reference != LATEST:
        # What is found is said where it is used.
        with console.quiet():
            store.find(reference, kind=RunKind.golden.value)


def _golden(config: Config) -> str | None:
    """Return the golden run that is asked for by name and will be looked up, or None."""
    if config.inputs.name == "golden":
        return config.inputs.run or config.golden
    prompt = config.prompt
    told = prompt.text is not None or prompt.file is not None or bool(prompt.texts)
    asked = config.inputs.name == "auto" and config.kind is RunKind.candidate and not told
    return config.golden if asked else None


_runs = itertools.count()


def began() -> float:
    """Return when a run began, on `time.perf_counter`'s clock: the first one, with the process."""
    now = time.perf_counter()
    if next(_runs):
        return now
    import psutil

    return now - (time.time() - psutil.Process().create_time())


def say_loading(config: Config) -> None:
    """Name the libraries that take seconds to import, where they are not there already."""
    libraries = ["mlflow", "torch", *open_backend.abilities(config).libraries, "transformers"]
    missing = [name for name in libraries if name not in sys.modules]
    if missing:
        console.say(f"loading {', '.join(missing)} ...")


def with_start_up(seconds: float, whole: float) -> str:
    """Return how long a run took, and with what came before it, where that is a second or more."""
    told = f"{seconds:.1f} s"
    return told if whole - seconds < 1 else f"{told} ({whole:.0f} s with start-up)"
