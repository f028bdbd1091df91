"""Print what a command says while it works, on a terminal and in a log file alike.

A child process whose output another command relays prints its notes and its progress as JSON, so
that the other shows them as its own.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from layerparity.ground.log import LOGGER
from layerparity.ground.secrets import redacted

_LOG_EVERY_SECONDS = 5.0
# Of a table, in letters, where there is no terminal.
_WIDTH = 160


@dataclass(frozen=True)
class _Brief:
    """What `brief` lets through: notes that were not said yet, and progress under a title."""

    title: str
    noted: set[str]


_briefs: list[_Brief] = []
_relayed: list[bool] = []
_logged: list[bool] = []
# What this command's comparisons concluded, as JSON, for a program that asked for it.
verdicts: list[str] = []


def only_log(is_shown: bool) -> None:
    """Print nothing where ``is_shown`` says that the log records are: they hold the same lines."""
    _logged[:] = [True] if is_shown else []


def say(text: str) -> None:
    """Print one line of progress or result."""
    LOGGER.info("%s", redacted(text))
    if not (_briefs or _logged):
        print(redacted(text), flush=True)


def note(text: str) -> None:
    """Print what a user should know of how a run was made; in brief, once."""
    if _relayed:
        print(json.dumps({"note": redacted(text)}), flush=True)
        return
    LOGGER.info("note: %s", redacted(text))
    if _briefs:
        if text in _briefs[-1].noted:
            return
        _briefs[-1].noted.add(text)
    if not _logged:
        print(f"note: {redacted(text)}", flush=True)


@contextmanager
def to_be_relayed() -> Iterator[None]:
    """Print notes and progress inside as JSON, for the process that reads them by `relay`."""
    _relayed.append(True)
    try:
        yield
    finally:
        _relayed.pop()


def relay(lines: Iterable[str]) -> None:
    """Say what a child says `to_be_relayed`: its notes, its progress as this process shows it."""
    with counting("blocks") as count:
        for line in lines:
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            message = parsed if isinstance(parsed, dict) else {}
            if "note" in message:
                note(message["note"])
            elif "done" in message:
                count(message["done"], message["total"], message["what"])
            else:
                say(line.rstrip())


def complain(text: str) -> None:
    """Print one message to standard error."""
    LOGGER.error("%s", redacted(text))
    print(redacted(text), file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; numbers to the right."""
    from rich.table import Table

    grid = Table(title=title, title_justify="left", header_style="bold")
    body = [[redacted(str(cell)) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(body) and all(_is_number(row[index]) for row in body)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        grid.add_row(*row)
    show(grid)


def show(renderable: Any) -> None:
    """Print anything rich can render, 160 columns wide where there is no terminal."""
    from rich.console import Console

    text = io.StringIO()
    Console(width=_WIDTH, highlight=False, file=text).print(renderable)
    LOGGER.info("%s", text.getvalue().rstrip())
    if _briefs or _logged:
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    # Where nobody reads it, rich would end the process, with the status of a comparison that fails.
    with console.capture() as drawn:
        console.print(renderable)
    print(drawn.get(), end="", flush=True)


def abandoned(error: BaseException) -> bool:
    """Say whether an error is that nobody reads this command's output any more, as after ``head``.

    What is printed from now on goes nowhere.
    """
    gone = False
    for stream in (sys.stdout, sys.stderr):
        try:
            output = stream.fileno()
        except (AttributeError, OSError, ValueError):
            continue
        asked = select.poll()
        asked.register(output, 0)
        if isinstance(error, BrokenPipeError) and any(
            at & select.POLLERR for _, at in asked.poll(0)
        ):
            gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)
    return gone


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be printed to standard output inside: the work of a job that makes hundreds."""
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def brief(title: str, noted: set[str]) -> Iterator[None]:
    """Let only notes and progress be shown inside: a run that is one step of a job.

    Progress bears the ``title`` and is wiped when done. ``noted`` collects what was said, so that
    the steps of a job that share it say each note once.
    """
    _briefs.append(_Brief(title, noted))
    try:
        yield
    finally:
        _briefs.pop()


def is_brief() -> bool:
    """Say whether a line is not shown now."""
    return bool(_briefs)


class Progress:
    """Counts steps: a moving bar on a terminal, a line every few seconds in a log file."""

    def __init__(self, title: str, total: int, bar: Any = None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._bar = bar
        self._task = bar.add_task(title, total=total, what="") if bar is not None else None
        self._said = self._began = time.monotonic()

    def step(self, what: str = "") -> None:
        """Count one step, named ``what``."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, what=what)
        now = time.monotonic()
        ended = self.done == self.total and not _briefs
        if not ended and now - self._said < _LOG_EVERY_SECONDS:
            return
        self._said = now
        left = (now - self._began) / self.done * (self.total - self.done)
        line = f"{self.title}: {self.done} of {self.total} {what}".rstrip()
        line += f", about {left:.0f} s left" if self.done < self.total else ""
        if _relayed:
            line = json.dumps({"done": self.done, "total": self.total, "what": what})
        else:
            LOGGER.info("%s", line)
        if self._bar is None and not _logged:
            print(line, flush=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """Yield a counter of ``total`` steps that shows itself as the output allows."""
    if _briefs:
        title = f"{_briefs[-1].title}: {title}"
    if not sys.stdout.isatty():
        yield Progress(title, total)
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[what]}"),
    )
    with rich.Progress(*columns, transient=bool(_briefs)) as bar:
        yield Progress(title, total, bar)


@contextmanager
def counting(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function of (done, total, what) for work that learns its length when it begins."""
    with ExitStack() as stack:
        shown: list[Progress] = []

        def count(done: int, total: int, what: str) -> None:
            if not shown:
                shown.append(stack.enter_context(progress(title, total)))
            while shown[0].done < done:
                shown[0].step(what)

        yield count


def bytes_text(count: float) -> str:
    """Return a byte count in the unit a person would use, decimal: 7.34 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _is_number(text: str) -> bool:
    try:
        float(text.split(" ", maxsplit=1)[0])
    except ValueError:
        return False
    return True
