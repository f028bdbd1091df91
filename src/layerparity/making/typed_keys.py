"""Know which keys the user typed for this run, and refuse one that would have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import STREAM
from layerparity.ports.opening import open_backend, open_port

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.making.request.inputs import Inputs
    from layerparity.settings.config import Config

_step: ContextVar[Sequence[str] | None] = ContextVar("step", default=None)


@contextmanager
def step(words: Sequence[str]) -> Iterator[None]:
    """Take these words of a sequence's step for what was typed.

    What stands beside the steps goes to all of them, so one that has no use for it is no mistake.
    """
    token = _step.set(words)
    try:
        yield
    finally:
        _step.reset(token)


def keys() -> list[str]:
    """Return the keys that were typed, groups included; empty where no command was."""
    from hydra.core.hydra_config import HydraConfig

    words = _step.get()
    if words is None:
        words = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return [word.partition("=")[0].lstrip("+~") for word in words]


# What any job may be given: where runs are kept, and what Hydra itself reads.
_ANY = ("job", "experiment", "tracking", "hydra")


def refuse_unread(config: Config, job: Any) -> None:
    """Raise UserError for a typed key that the module of a job does not read.

    Such a module has ``READS``, or ``reads`` of a configuration, where it does not read them all.
    """
    own = getattr(job, "reads", None)
    known: Sequence[str] | None = own(config) if own else getattr(job, "READS", None)
    if known is None:
        return
    for key in keys():
        group = re.split(r"[./@]", key)[0]
        if group not in (*_ANY, *known):
            listed = ", ".join(known) or "none but its own, job.*"
            raise UserError(
                f"{key}= would do nothing: job={config.job.name} does not read it",
                f"leave it out; it reads {listed}.",
            )


def refuse_unused(backend: Backend, inputs: Inputs) -> None:
    """Raise UserError for a typed key that changes nothing in a run so fed on such a backend."""
    for key in keys():
        group = key.partition(".")[0]
        if key in backend.unused:
            raise UserError(f"{key} does nothing on backend={backend.name}: leave it out.")
        if key == "candidate":
            raise UserError("candidate= belongs to job=compare: leave it out.")
        if group == "prompt" and inputs.source != "prompt" and inputs.before is None:
            raise UserError(
                f"{key} would do nothing: the run is fed {inputs.chosen}. Leave it out, or use "
                "inputs=prompt."
            )
        if key == "golden" and inputs.source != "golden":
            raise UserError(
                f"{key} would do nothing: the run is fed {inputs.chosen}. Leave it out, or use "
                "inputs=golden."
            )


def refuse_unmapped(config: Config) -> None:
    """Raise UserError for a typed device_map that changes nothing; nothing heavy is imported."""
    if "device_map" not in keys() or config.device_map.strategy == STREAM:
        return
    ranks = open_port.ranks_device(config)
    if ranks and not open_port.maps_devices(config):
        label = open_port.label(config.port).partition(" ")[0]
        raise UserError(
            f"device_map does nothing with port={label}, which computes in {ranks}: leave it out."
        )
    if not ranks and open_backend.abilities(config).one_device:
        raise UserError(f"device_map does nothing on backend={config.backend.name}: leave it out.")
