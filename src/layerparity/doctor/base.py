"""Check: one thing that a machine may lack, and the results that it gives.

A check's file holds ``CHECK``. It yields a `Result` for each line of the table; a UserError that it
raises is a problem, and so is any other exception, which is then named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from layerparity.ground import registry
from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_OURS = "a fault of this check, not of the machine: report it; the other lines stand"


class State(StrEnum):
    """How one line ends."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Section(IntEnum):
    """Where in the table a check's lines stand."""

    SOFTWARE = 0
    DEVICES = 1
    MACHINE = 2
    FILES = 3


@dataclass(frozen=True)
class Result:
    """One line: what was looked at, how it is, what was found, and what to do about it.

    Raises ValueError on construction where something is wrong and no cure is given.
    """

    check: str
    state: State
    found: str
    cure: str = ""

    def __post_init__(self) -> None:
        if self.state is not State.OK and not self.cure:
            raise ValueError(f"{self.check} is a {self.state.value} without a cure")


@dataclass(frozen=True)
class Check:
    """Looks at one thing; ``look`` gets the command's configuration."""

    section: Section
    look: Callable[[Config], Iterable[Result]]


def ok(check: str, found: str, hint: str = "") -> Result:
    """Return a line that is in order; ``hint`` says how to get more."""
    return Result(check, State.OK, found, hint)


def warning(check: str, found: str, cure: str) -> Result:
    """Return a line about what works, but worse or otherwise than it could."""
    return Result(check, State.WARNING, found, cure)


def problem(check: str, found: str, cure: str) -> Result:
    """Return a line about what does not work."""
    return Result(check, State.PROBLEM, found, cure)


def examine(config: Config, step: Callable[[str], None] = lambda name: None) -> list[Result]:
    """Return the lines of every check, in the order of the table; ``step`` is told each name."""
    found: list[tuple[int, list[Result]]] = []
    for name in registry.names("doctor"):
        found.append(_examined(name, config))
        step(name)
    return [result for _, results in sorted(found, key=lambda each: each[0]) for result in results]


def _examined(name: str, config: Config) -> tuple[int, list[Result]]:
    results: list[Result] = []
    section = len(Section)
    try:
        check: Check = registry.load("doctor", name).CHECK
        section = int(check.section)
        for result in check.look(config):
            # Kept as they come: the lines before an exception are as true as any.
            results.append(result)
    except UserError as error:
        results.append(_told(name, error))
    except (Exception, SystemExit) as error:
        # Whatever a check does, the others are still worth hearing.
        results.append(problem(name, f"{type(error).__name__}: {error}", _OURS))
    return section, results


def _told(name: str, error: UserError) -> Result:
    """Return a mistake with its cure apart: our messages end in ``: CURE``."""
    found, _, cure = str(error).rpartition(": ")
    return problem(name, found or str(error), cure if found else "see the message")
