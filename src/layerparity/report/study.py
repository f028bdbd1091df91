"""A study: runs that a job held beside each other, what it found of them, kept and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.active import ActiveRun
from layerparity.tracking.links import say_link


@dataclass(frozen=True)
class Study:
    """What was found, as a table with sentences below it, and as numbers that are drawn.

    ``points`` are (name, value, step) of the series that MLflow draws; ``texts`` are files by their
    name, ``tags`` what the study's run is found by. ``follows`` is the command that comes next.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]
    points: Sequence[tuple[str, float, int]]
    exit: Exit = Exit.OK
    texts: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    follows: str = ""

    def keep(self, run: ActiveRun) -> None:
        """Keep the numbers, files and tags in the study's run."""
        run.log_metrics(self.points)
        for name, text in self.texts.items():
            run.log_text(text, name)
        run.set_tags(self.tags)

    def show(self, run: ActiveRun, tracking: TrackingConfig) -> Exit:
        """Print the table, the sentences, where the run is and what follows; return the exit."""
        console.table(self.title, self.columns, self.rows)
        for line in self.lines:
            console.say(line)
        say_link(run, tracking)
        if self.follows:
            console.say(f"next:   {self.follows}")
        return self.exit
