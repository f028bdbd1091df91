"""Sweep: the parent run of a Hydra multirun, opened before its jobs and closed whatever happens.

Imported whenever Hydra starts, so mlflow is only imported once a sweep really begins.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.experimental.callback import Callback

from layerparity import console

if TYPE_CHECKING:
    from layerparity.tracking.active import ActiveRun
    from layerparity.tracking.store import Store
    from layerparity.tracking.stored import StoredRun

PARENT_VARIABLE = "LAYERPARITY_PARENT_RUN"
SWEPT_JOB = "run"
_SHARED_TAGS = ("backend", "device", "model", "dtype", "port", "feed")
_open: list[tuple[Store, ActiveRun]] = []


class ChildRow(NamedTuple):
    """One line of a sweep's closing table."""

    name: str
    status: str
    url: str


class SweepParent(Callback):
    """Hydra callback: opens the parent run of a multirun of ``job=run`` and tells its children."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Open the parent and put its id into the environment, where workers see it too."""
        # An id left by an outer command is not this sweep's parent.
        os.environ.pop(PARENT_VARIABLE, None)
        if config.hydra.runtime.choices.get("job") != SWEPT_JOB:
            return
        from layerparity.tracking.store import open_store

        overrides = [str(each) for each in config.hydra.overrides.task]
        store = open_store(config.tracking)
        name = config.get("name") or "sweep " + " ".join(overrides)
        parent = store.begin(name[:200], "sweep", {}, {"overrides": overrides})
        os.environ[PARENT_VARIABLE] = parent.id
        console.say(f"{parent.name}  {parent.id}\n{parent.url}")
        _open.append((store, parent))


def close_parent(failed: bool = False, error: BaseException | None = None) -> list[ChildRow]:
    """Close the parent run, if this process opened one, and return a row for each child.

    FINISHED if every child finished; KILLED if the sweep or a child was stopped; else FAILED, also
    when ``failed`` says that a job ended before it had a run. ``error``, or the exception that is
    being handled (this is called in a ``finally``), is what ended the sweep.
    """
    os.environ.pop(PARENT_VARIABLE, None)
    if not _open:
        return []
    store, parent = _open.pop()
    children = store.children(parent.id)
    error = error or sys.exception()
    parent.set_tags(_summary(children))
    parent.end(_status(children, failed, error), error)
    return [ChildRow(child.name, child.status, child.url) for child in children]


def _status(children: list[StoredRun], failed: bool, error: BaseException | None) -> str:
    endings = {child.status for child in children}
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or "KILLED" in endings:
        return "KILLED"
    whole = endings == {"FINISHED"} and not failed and error is None
    return "FINISHED" if whole else "FAILED"


def _summary(children: list[StoredRun]) -> dict[str, object]:
    """Return how the children ended, and the tags that all of them share."""
    counts = Counter(child.status.lower() for child in children)
    tags: dict[str, object] = {"children": len(children)}
    tags.update({f"children.{status}": count for status, count in sorted(counts.items())})
    for name in _SHARED_TAGS:
        values = {child.tags.get(name, "") for child in children}
        if len(values) == 1 and values != {""}:
            tags[name] = values.pop()
    return tags
