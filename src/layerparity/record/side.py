"""Side: one of the two sides of a comparison, where to find its runs and how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerparity.ground.profile import RunProfile


@dataclass(frozen=True)
class RunOrigin:
    """How one run of a side was made.

    ``named`` is its id, or its folder. ``settings`` are the keys of a command line that differ from
    the defaults. ``names`` is a dump's name map, where it is not in the dump's folder.
    """

    named: str
    proved: bool
    stages: tuple[str, ...]
    settings: dict[str, Any]
    names: str = ""


@dataclass(frozen=True)
class Side:
    """One of the two runs: where to find it, how it was made and what it really ran on.

    ``named`` names all of it on a command line: a run's id, the id of the sweep or a folder; it is
    empty where nothing does. ``dtypes`` are what its runs were computed in, or what a dump holds,
    ``feeds`` how their stages were fed, each once; of a dump there are none of the latter. ``made``
    holds its runs, oldest first. ``profile`` says where their time went, added up by stage; None
    where they keep none.
    """

    name: str
    backend: str
    device: str
    dtypes: tuple[str, ...]
    port: str
    url: str = ""
    model: str = ""
    scope: str = ""
    feeds: tuple[str, ...] = ()
    named: str = ""
    made: tuple[RunOrigin, ...] = ()
    profile: RunProfile | None = None

    @property
    def only_feed(self) -> str:
        """How all its runs were fed; empty where they differ, or nothing says."""
        return self.feeds[0] if len(self.feeds) == 1 else ""
