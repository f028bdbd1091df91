"""Memory: what this process may still take, by the machine and by every limit on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.console import bytes_text
from layerparity.machine.memory import host_memory

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# torch, transformers and mlflow hold about 1 GB once they are imported, before any weight.
_TOO_LITTLE = 1e9
_LITTLE = 4e9
_RAISE = "raise {limit}; 'python run.py job=plan' says what a model needs"
_CURE = "end other programs; 'python run.py job=plan' says what a model needs"


def look(config: Config) -> Iterator[Result]:
    """Yield one line."""
    memory = host_memory()
    found = f"{bytes_text(memory.free)} free of {bytes_text(memory.total)}"
    if memory.limit:
        found += f" ({memory.limit} leaves no more)"
    cure = _RAISE.format(limit=memory.limit) if memory.limit else _CURE
    if memory.free < _TOO_LITTLE:
        yield problem("memory", found, cure)
    elif memory.free < _LITTLE:
        yield warning("memory", found, cure)
    else:
        yield ok("memory", found)


CHECK = Check(Section.MACHINE, look)
