"""Memory: what is free on the host, a container's limit counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.console import bytes_text
from layerparity.doctor._machine import memory_left
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning

if TYPE_CHECKING:
    from layerparity.config import Config

# torch, transformers and mlflow hold about 1 GB once they are imported, before any weight.
_TOO_LITTLE = 1e9
_LITTLE = 4e9
_CURE = "end other programs; 'python run.py job=plan' says what a model needs"


def look(config: Config) -> Iterator[Result]:
    """Yield one line."""
    import psutil

    host = psutil.virtual_memory()
    left = memory_left()
    free = host.available if left is None else min(left, host.available)
    found = f"{bytes_text(free)} free of {bytes_text(host.total)}"
    if free < host.available:
        found += " (a limit on this process's group leaves no more)"
    if free < _TOO_LITTLE:
        yield problem("memory", found, _CURE)
    elif free < _LITTLE:
        yield warning("memory", found, _CURE)
    else:
        yield ok("memory", found)


CHECK = Check(Section.MACHINE, look)
