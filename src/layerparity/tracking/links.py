"""Print a run's page, and once in a command what serves the page of another store."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layerparity.ground import console
from layerparity.ground.program import program
from layerparity.settings.tracking import EMBEDDED, UI_FILE, TrackingConfig

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.active import ActiveRun

# To hear from this machine.
_SECONDS = 0.2
# Stores whose command was printed already.
_printed: set[Path] = set()


def say_link(run: ActiveRun | StoredRun, config: TrackingConfig) -> None:
    """Print a run's name, id and page, and what serves the page."""
    console.say(f"{run.name}  {run.id}\n{run.url}")
    say_served(config)


def say_served(config: TrackingConfig) -> None:
    """Print the command that serves a store's pages, where nothing serves them yet; once."""
    if config.name != EMBEDDED or config.root in _printed or console.is_brief():
        return
    if (config.root / UI_FILE).is_file() and _listens(config.address):
        return
    _printed.add(config.root)
    console.say(" ".join([f"served by: {program()} job=ui", *config.words]))


def _listens(address: str) -> bool:
    """Return whether something listens where the UI last served this store."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), _SECONDS):
            return True
    except (OSError, ValueError):
        return False
