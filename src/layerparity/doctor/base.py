"""Run every check of a machine and gather a result for each line of the table.

A file of checks holds ``CHECKS``. A check yields a `Result` for each line; a UserError that it
raises is a problem with a cure of its own, and so is any other exception, which is then named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.tracking.process import is_of_a_signal

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_OURS = "a fault of this check, not of the machine: report it; the other lines stand"
_SEE = "see the message"


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
    """Looks at one thing; ``look`` gets the command's configuration.

    Lines stand by section, and in a section by the check's name.
    """

    name: str
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
    """Return the lines of every check, in the order of the table; ``step`` is told each file."""
    lines: list[tuple[int, str, list[Result]]] = []
    for name in registry.names("doctor"):
        try:
            checks: tuple[Check, ...] = registry.load("doctor", name).CHECKS
        except Exception as error:
            lines.append((len(Section), name, [_fault(name, error)]))
            checks = ()
        lines += [(check.section, check.name, _results(check, config)) for check in checks]
        step(name)
    lines.sort(key=lambda line: line[:2])
    return [result for _, _, results in lines for result in results]


def _results(check: Check, config: Config) -> list[Result]:
    results: list[Result] = []
    try:
        for result in check.look(config):
            # Kept as they come: the lines before an exception are as true as any.
            results.append(result)
    except UserError as error:
        results.append(problem(check.name, error.found or str(error), error.cure or _SEE))
    except (Exception, SystemExit) as error:
        if is_of_a_signal(error):
            raise
        # Whatever a check does, the others are still worth hearing.
        results.append(_fault(check.name, error))
    return results


def _fault(name: str, error: BaseException) -> Result:
    return problem(name, f"{type(error).__name__}: {error}", _OURS)
