"""Print a run's page, and once in a command what serves the page of another store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.quoting import typed
from layerparity.settings.tracking import EMBEDDED, TrackingConfig

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.active import ActiveRun

# Stores whose command was printed already.
_printed: set[Path] = set()


def say_link(run: ActiveRun | StoredRun, config: TrackingConfig) -> None:
    """Print a run's name, id and page, and what serves the page."""
    console.say(f"{run.name}  {run.id}\n{run.url}")
    say_served(config)


def say_served(config: TrackingConfig) -> None:
    """Print the command that serves a store's pages, where the bare ``job=ui`` would not; once."""
    usual = config.name != EMBEDDED or config.root == TrackingConfig().root
    if usual or config.root in _printed or console.is_brief():
        return
    _printed.add(config.root)
    console.say(f"served by: python run.py job=ui {typed('tracking.folder', config.folder)}")
