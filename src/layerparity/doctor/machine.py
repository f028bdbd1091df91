"""Check what this process may take of the machine: memory, and CPUs for its threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.console import bytes_text
from layerparity.ground.program import program
from layerparity.machine.memory import cpus_granted, host_memory

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# torch, transformers and mlflow hold about 1 GB once they are imported, before any weight.
_TOO_LITTLE = 1e9
_LITTLE = 4e9
_RAISE = "raise {limit}; '{program} job=plan' says what a model needs"
_CURE = "end other programs; '{program} job=plan' says what a model needs"
_VARIABLE = "OMP_NUM_THREADS"
_BUSY = 2.0


def check_memory(config: Config) -> Iterator[Result]:
    """Yield one line."""
    memory = host_memory()
    found = f"{bytes_text(memory.free)} free of {bytes_text(memory.total)}"
    if memory.limit:
        found += f" ({memory.limit} leaves no more)"
    cure = (_RAISE if memory.limit else _CURE).format(limit=memory.limit, program=program())
    if memory.free < _TOO_LITTLE:
        yield problem("memory", found, cure)
    elif memory.free < _LITTLE:
        yield warning("memory", found, cure)
    else:
        yield ok("memory", found)


def check_threads(config: Config) -> Iterator[Result]:
    """Yield one line: more threads than CPUs slow each other down several times."""
    cpus = usable_cpus()
    words = os.environ.get(_VARIABLE, "")
    asked, source = int(words) if words.isdigit() else 0, _VARIABLE
    if config.threads is not None:
        asked, source = config.threads, "threads"
    load = os.getloadavg()[0]
    found = f"{cpus} CPUs" if cpus > 1 else "1 CPU"
    found += f", {source}={asked}" if asked else ""
    if asked > cpus:
        cure = f"give {cpus} or fewer" if source == "threads" else f"unset {_VARIABLE}"
        yield warning("cpu threads", f"{found}: more threads than CPUs", cure)
    elif load > _BUSY * cpus:
        cure = "wait for other programs, or end them: times will not mean much"
        yield warning("cpu threads", f"{found}, and {load:.0f} threads want them", cure)
    else:
        yield ok("cpu threads", found)


def usable_cpus() -> int:
    """Return how many CPUs this process may use, quotas of a container counted."""
    count = len(os.sched_getaffinity(0))
    return min(count, cpus_granted() or count)


CHECKS = (
    Check("memory", Section.MACHINE, check_memory),
    Check("threads", Section.MACHINE, check_threads),
)
