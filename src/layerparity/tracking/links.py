"""Links: a run's page, and once a command what serves it where the store is not the usual one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from layerparity.ground import console
from layerparity.ground.quoting import typed
from layerparity.settings.tracking import EMBEDDED, TrackingConfig

_told: set[Path] = set()


class Linked(Protocol):
    """A run with a page in the UI."""

    @property
    def name(self) -> str:
        """What the run is called."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def url(self) -> str:
        """Its page."""


def say_link(run: Linked, config: object) -> None:
    """Print a run's name, id and page, and what serves the page; ``config`` is the tracking's."""
    console.say(f"{run.name}  {run.id}\n{run.url}")
    say_served(config)


def say_served(config: object) -> None:
    """Print the command that serves a store's pages, where the bare ``job=ui`` would not; once."""
    folder = str(getattr(config, "folder", ""))
    tracking = TrackingConfig(folder=folder)
    usual = TrackingConfig()
    usually = getattr(config, "name", "") != EMBEDDED or tracking.root == usual.root
    if usually or tracking.root in _told or console.is_brief():
        return
    _told.add(tracking.root)
    console.say(f"served by: python run.py job=ui {typed('tracking.folder', folder)}")
