"""Console: what a command says while it works, on a terminal and in a log file alike."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

_LOG_EVERY_SECONDS = 5.0


def say(text: str) -> None:
    """Print one line of progress or result."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Print one message to standard error."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; numbers to the right."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", header_style="bold")
    body = [[str(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(body) and all(_is_number(row[index]) for row in body)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        made.add_row(*row)
    show(made)


def show(renderable: Any) -> None:
    """Print anything rich can render, 160 columns wide where there is no terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(renderable)


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be printed to standard output inside: the work of a job that makes hundreds."""
    with redirect_stdout(io.StringIO()):
        yield


class Progress:
    """Counts steps: a moving bar on a terminal, a line every few seconds in a log file."""

    def __init__(self, title: str, total: int, bar: Any = None) -> None:
        self.title, self.total, self.done = title, total, 0
        self._bar = bar
        self._task = bar.add_task(title, total=total, what="") if bar is not None else None
        self._said = time.monotonic()

    def step(self, what: str = "") -> None:
        """Count one step, named ``what``."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, what=what)
        elif time.monotonic() - self._said >= _LOG_EVERY_SECONDS or self.done == self.total:
            self._said = time.monotonic()
            say(f"{self.title}: {self.done} of {self.total} {what}".rstrip())


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """Yield a counter of ``total`` steps that shows itself as the output allows."""
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
    with rich.Progress(*columns) as bar:
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
