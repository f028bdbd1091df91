"""Show how far long work is: a moving bar on a terminal, a line now and then in a log file.

What takes minutes within one step says what it is at by `doing`, and how far by `measured`.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from layerparity.ground import console
from layerparity.ground.console import duration_text

# A line of a log file, and a message to the process that relays this one, come so often.
_LOG, _RELAY = "log", "relay"
_LOG_EVERY_SECONDS = 30.0
_RELAY_EVERY_SECONDS = 5.0
# Between two looks at the clock.
_TICK_SECONDS = 1.0
# Fewer small items take no time that anybody waits for.
_MANY = 2000
# The work that is counted now, the innermost last, and what says how far its step is.
_counted: list[Progress] = []
_measured: list[Callable[[], str]] = []
_T = TypeVar("_T")


class Progress:
    """Counts steps of long work: a moving bar on a terminal, elsewhere a line now and then.

    How long the rest takes is told by the steps that were done, once there is one. ``weights`` say,
    step by step, how long each may take against the others; without them all are equal.
    """

    def __init__(
        self, title: str, total: int, bar: Any = None, weights: Sequence[float] = ()
    ) -> None:
        self.title, self.total, self.done = title, total, 0
        self._weights = weights or [1.0] * total
        self._what = self._doing = ""
        self._began = self._from = self._stepped = time.monotonic()
        self._said = dict.fromkeys((_LOG, _RELAY), self._began)
        self._timed = 0
        self._told_left: float | None = None
        self._one = threading.Lock()
        self._bar = bar
        if bar is not None:
            fields = {"now": _Drawn(self._now), "left": _Drawn(self.left)}
            self._task = bar.add_task(title, total=total, **fields)

    def step(self, what: str = "", timed: bool = True) -> None:
        """Count one step, named ``what``.

        ``timed`` is False where its time says nothing of the others': it was done before, or is a
        small one that comes first.
        """
        self.done += 1
        self._what, self._doing, self._stepped = what, "", time.monotonic()
        if timed or self._timed:
            self._timed += 1
        else:
            self._from = self._stepped
        if self._bar is not None:
            self._bar.update(self._task, advance=1)
        self.tell()

    def doing(self, what: str) -> None:
        """Name what the step under way is at."""
        self._doing = what

    def follow(self, done: int, total: int, what: str, doing: str, left: float) -> None:
        """Show what another process said of its own progress; it knows how long the rest takes."""
        self._told_left = left
        while self.done < min(done, total):
            self.step(what)
        self._doing = doing
        self.tell()

    def tell(self) -> None:
        """Say a line where the last one, or the beginning, was long ago, and at the end."""
        now = time.monotonic()
        ended = self.done == self.total and not console.is_brief()
        relayed = console.is_relayed()
        if relayed and self._is_due(_RELAY, _RELAY_EVERY_SECONDS, now, ended):
            left = self._seconds_left(now)
            told = {"done": self.done, "total": self.total, "what": self._what, "left": left}
            print(json.dumps({"progress": {**told, "doing": self._now()}}), flush=True)
        if not self._is_due(_LOG, _LOG_EVERY_SECONDS, now, ended):
            return
        line = f"{self.title}: {self.done} of {self.total}"
        line += f", {self._now()}" if self._doing else f" {self._what}".rstrip()
        if not ended:
            left_text = self.left()
            line += f"; {duration_text(now - self._began)} so far"
            line += f", {left_text}" if left_text else ""
        # Who reads the messages shows them; the log of the run is this process's.
        console.say_progress(line, shown=relayed or self._bar is not None)

    def _is_due(self, where: str, every: float, now: float, ended: bool) -> bool:
        """Say whether something is to be said somewhere now, and note that it is."""
        with self._one:
            if math.isinf(self._said[where]) or not (ended or now - self._said[where] >= every):
                return False
            # The end is said once.
            self._said[where] = math.inf if ended else now
            return True

    def left(self) -> str:
        """Return how long the rest takes, ``about 12 min left``; empty where nothing tells it."""
        seconds = self._seconds_left(time.monotonic())
        return f"about {duration_text(seconds)} left" if seconds >= 1 else ""

    def _seconds_left(self, now: float) -> float:
        """Return how many seconds the rest takes; -1 where nothing tells it."""
        if self._told_left is not None:
            return self._told_left
        to_do = self.total - self.done
        if not self._timed or to_do < 1:
            return -1.0
        told = sum(self._weights[self.done - self._timed : self.done])
        due, later = self._weights[self.done], sum(self._weights[self.done + 1 :])
        if not told:
            return -1.0
        each, under_way = (self._stepped - self._from) / told, now - self._stepped
        if under_way <= each * due:
            return each * (due + later) - under_way
        # A step that takes longer than those before it says more than they do.
        return (now - self._from) / (told + due) * later

    def _now(self) -> str:
        """Return what the step under way is at and how far; between two steps the one before."""
        if not self._doing:
            return self._what
        return ", ".join(filter(None, [self._doing, *(each() for each in _measured[-1:])]))


@dataclass(frozen=True)
class _Drawn:
    """A text of a bar that is made each time the bar is drawn."""

    text: Callable[[], str]

    def __str__(self) -> str:
        return self.text()


@contextmanager
def shown(title: str, total: int, weights: Sequence[float] = ()) -> Iterator[Progress]:
    """Yield a counter of ``total`` steps that shows itself as the output allows.

    ``weights`` are those of `Progress`.
    """
    with ExitStack() as stack:
        bar = None
        if sys.stdout.isatty():
            from rich import progress as rich

            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeElapsedColumn(),
                rich.TextColumn("{task.fields[left]}", markup=False),
                rich.TextColumn("{task.fields[now]}", markup=False),
            )
            bar = stack.enter_context(rich.Progress(*columns, transient=console.is_brief()))
        work = Progress(console.titled(title), total, bar, weights)
        ended = threading.Event()

        def watch() -> None:
            # Where nobody reads any more, whoever works here meets it too, and says so.
            with suppress(OSError, ValueError):
                while not ended.wait(_TICK_SECONDS):
                    work.tell()

        watching = threading.Thread(target=watch, name="progress", daemon=True)
        watching.start()
        _counted.append(work)
        try:
            yield work
        finally:
            _counted.remove(work)
            ended.set()
            watching.join()


def doing(what: str) -> None:
    """Name what the step under way is at, where its work is counted; its end forgets it."""
    if _counted:
        _counted[-1].doing(what)


@contextmanager
def measured(text: Callable[[], str]) -> Iterator[None]:
    """Show behind what is under way inside how far it is, such as ``3.10 GB of 7.34 GB read``."""
    _measured.append(text)
    try:
        yield
    finally:
        _measured.remove(text)


def each(title: str, items: Sequence[_T]) -> Iterator[_T]:
    """Yield items one by one; of many, show how many are done."""
    if len(items) < _MANY:
        yield from items
        return
    with shown(title, len(items)) as work:
        for item in items:
            yield item
            work.step()


@contextmanager
def counting(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function of (done, total, what) for work that learns its length when it begins."""
    with ExitStack() as stack:
        told: list[Progress] = []

        def count(done: int, total: int, what: str) -> None:
            if not told:
                told.append(stack.enter_context(shown(title, total)))
            while told[0].done < done:
                told[0].step(what)

        yield count


def relay(lines: Iterable[str]) -> None:
    """Say what a child says `to_be_relayed`: its notes, its progress as this process shows it."""
    with ExitStack() as stack:
        told: list[Progress] = []
        for line in lines:
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            message = parsed if isinstance(parsed, dict) else {}
            if "note" in message:
                console.note(message["note"])
            elif "progress" in message:
                news = message["progress"]
                if not told:
                    told.append(stack.enter_context(shown("blocks", news["total"])))
                told[0].follow(**news)
            else:
                console.say(line.rstrip())
