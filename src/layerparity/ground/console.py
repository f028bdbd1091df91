"""Print what a command says while it works, on a terminal and in a log file alike.

A child process whose output another command relays prints its notes and its progress as JSON, so
that the other shows them as its own.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerparity.ground.log import LOGGER
from layerparity.ground.secrets import redacted

# What the system says of a file that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# A name from elsewhere may hold what moves the cursor, clears the screen, or turns text around; or
# half a letter, which no stream takes.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
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
# What this command concluded or listed, as JSON, for a program that asked for it.
records: list[str] = []


def only_log(is_shown: bool) -> None:
    """Print nothing where ``is_shown`` says that the log records are: they hold the same lines."""
    _logged[:] = [True] if is_shown else []


def plain(text: str) -> str:
    """Return a text without secrets, and with what would command a terminal written out."""
    return _COMMANDS.sub(lambda found: repr(found[0])[1:-1], redacted(text))


def say(text: str) -> None:
    """Print one line of progress or result."""
    LOGGER.info("%s", plain(text))
    if not (_briefs or _logged):
        print(plain(text), flush=True)


def note(text: str) -> None:
    """Print what a user should know of how a run was made; in brief, once."""
    if _relayed:
        print(json.dumps({"note": plain(text)}), flush=True)
        return
    LOGGER.info("note: %s", plain(text))
    if _briefs:
        if text in _briefs[-1].noted:
            return
        _briefs[-1].noted.add(text)
    if not _logged:
        print(f"note: {plain(text)}", flush=True)


@contextmanager
def to_be_relayed() -> Iterator[None]:
    """Print notes and progress inside as JSON, for the process that reads them by `relay`."""
    _relayed.append(True)
    try:
        yield
    finally:
        _relayed.pop()


def complain(text: str) -> None:
    """Print one message to standard error."""
    LOGGER.error("%s", plain(text))
    print(plain(text), file=sys.stderr, flush=True)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], narrow: bool = False
) -> None:
    """Print a table; numbers to the right.

    A ``narrow`` one has no lines, and no column but the last is ever broken.
    """
    from rich.box import HEAVY_HEAD
    from rich.table import Table
    from rich.text import Text

    # As text: rich would take brackets in a run's name, or a path, for markup.
    box = None if narrow else HEAVY_HEAD
    grid = Table(title=Text(plain(title)), title_justify="left", header_style="bold", box=box)
    body = [[plain(str(cell)) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(body) and all(_is_number(row[index]) for row in body)
        side: Literal["left", "right"] = "right" if numeric else "left"
        whole = narrow and index < len(columns) - 1
        grid.add_column(column, justify=side, overflow="fold", no_wrap=whole)
    for row in body:
        grid.add_row(*map(Text, row))
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


def unwritable(error: BaseException) -> bool:
    """Say whether an error is that standard output takes nothing, as a file on a full disk; say so.

    What is printed from now on goes nowhere.
    """
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename:
        return False
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    try:
        # Python drops what it could not write, so a byte is tried.
        os.write(output, b"\n")
        return False
    except OSError:
        _mute(sys.stdout)
    complain(f"layerparity: standard output cannot be written ({error.strerror}).")
    return True


def _mute(stream: Any) -> None:
    """Let what a stream prints from now on, and what waits, go nowhere."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


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


def is_relayed() -> bool:
    """Say whether another process reads what this one prints, `to_be_relayed`."""
    return bool(_relayed)


def titled(title: str) -> str:
    """Return a title of progress behind that of the step that is shown in brief."""
    return f"{_briefs[-1].title}: {title}" if _briefs else title


def say_progress(text: str, shown: bool) -> None:
    """Print a line of progress, brief or not; where a bar is ``shown``, to the log alone."""
    LOGGER.info("%s", redacted(text))
    if not (shown or _logged):
        print(redacted(text), flush=True)


def bytes_text(count: float) -> str:
    """Return a byte count in the unit a person would use, decimal: 7.34 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration as a person says it: 95 s, 12 min, 3 h 05 min."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _is_number(text: str) -> bool:
    try:
        float(text.split(" ", maxsplit=1)[0])
    except ValueError:
        return False
    return True
