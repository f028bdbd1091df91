"""Look over this machine: packages, devices, memory, disk, runs, checkpoint; with the cures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console, progress, registry
from layerparity.ground.errors import Exit

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("backend", "device_map", "model", "threads", "tp_degree")


@dataclass
class Settings:
    """conf/job/doctor.yaml."""

    name: str = "doctor"


def run(config: Config) -> Exit:
    """Make every check, show what each found, and end with 5 where one is a problem."""
    from rich.table import Table
    from rich.text import Text

    from layerparity.doctor.base import State, examine

    with progress.shown("checks", len(registry.names("doctor"))) as bar:
        results = examine(config, bar.step)
    table = Table(title="This machine", title_justify="left", header_style="bold")
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for each in results:
        state = Text(each.state.value, style=_STYLES[each.state.value])
        # As text: rich would take brackets in a path or an extra for markup.
        table.add_row(Text(each.check), state, Text(each.found), Text(each.cure))
    console.show(table)
    counts = Counter(result.state for result in results)
    said = [_counted(counts[state], state.value) for state in (State.PROBLEM, State.WARNING)]
    console.say(f"{' and '.join(said)} in {_counted(len(results), 'line')}")
    return Exit.NOT_READY if counts[State.PROBLEM] else Exit.OK


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"
