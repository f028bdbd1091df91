"""Threads: CPUs this process may use, against the threads that torch will take and others have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor._machine import usable_cpus
from layerparity.doctor.base import Check, Result, Section, ok, warning

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_VARIABLE = "OMP_NUM_THREADS"
_BUSY = 2.0


def look(config: Config) -> Iterator[Result]:
    """Yield one line: more threads than CPUs slow each other down several times."""
    cpus = usable_cpus()
    asked, source = _asked(config)
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


def _asked(config: Config) -> tuple[int, str]:
    """Return how many threads were asked for (0: nobody did), and by what."""
    if config.threads is not None:
        return config.threads, "threads"
    given = os.environ.get(_VARIABLE, "")
    return (int(given), _VARIABLE) if given.isdigit() else (0, "")


CHECK = Check(Section.MACHINE, look)
