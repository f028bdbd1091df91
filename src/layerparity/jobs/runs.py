"""List the runs of the tracking store: what each is, how it ended, how large it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError, nearest
from layerparity.making.names import port_in_name
from layerparity.settings.config import Config
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun

_STATUSES = ("FINISHED", "FAILED", "KILLED", "RUNNING")
_SHOWN = 8


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ()


@dataclass
class Settings:
    """conf/job/runs.yaml: which runs are listed."""

    name: str = "runs"
    kind: str | None = key(None, "list runs of this kind: golden, candidate, comparison, ...")
    model: str | None = key(None, "list runs of this model")
    verdict: str | None = key(None, "list runs with this verdict: pass, fail or inconclusive")
    status: str | None = key(None, "list runs that ended so: FINISHED, FAILED, KILLED or RUNNING")
    filter: str | None = key(None, "list runs that MLflow's own search finds by this")
    limit: int = key(50, "how many runs are listed, the newest first", least=1, most=10000)


def run(config: Config) -> Exit:
    """Print a table of the runs that every given key fits, newest first."""
    from layerparity.settings.tracking import EMBEDDED, SERVER, read_config
    from layerparity.tracking.database import FILE_NAME
    from layerparity.tracking.opening import open_store
    from layerparity.tracking.stored_runs import equals, tag_is

    job = config.job
    tags = {"kind": job.kind, "model": job.model, "verdict": job.verdict}
    clauses = [tag_is(name, value) for name, value in tags.items() if value is not None]
    if job.status is not None:
        clauses.append(equals("attributes.status", _status(job.status)))
    place = read_config(config.tracking)
    if place.name == EMBEDDED and not (place.root / FILE_NAME).exists():
        # Opening would make one, where a path was mistyped.
        console.say(f"There is no store of runs in {place.root}; tracking.folder= names another.")
        console.records.append("[]")
        return Exit.OK
    store = open_store(place)
    found = store.filtered(clauses, job.filter, job.limit + 1)
    sizes = {each.id: store.size(each) for each in found[: job.limit]}
    rows = [_row(each, sizes[each.id]) for each in found[: job.limit]]
    told = [_record(each, sizes[each.id]) for each in found[: job.limit]]
    console.records.append(json.dumps(told))
    if not rows:
        fits = " fits" if clauses or job.filter else ""
        key = "tracking.uri=" if store.config.name == SERVER else "tracking.folder="
        console.say(f"No run in {store.config.place}{fits}; {key} names another store.")
        for line in _hints(store.every(), tags) if clauses else ():
            console.say(line)
        return Exit.OK
    columns = ("id", "ended", "began", "size", "run")
    console.table(f"Runs in {store.config.place}", columns, rows, narrow=True)
    known = [size for size in sizes.values() if size is not None]
    total = f", {console.bytes_text(sum(known))}" if known else ""
    more = f"; there are more: job.limit={2 * job.limit} lists them" if found[job.limit :] else ""
    console.say(f"{len(rows)} run{'s' if len(rows) > 1 else ''}{total}{more}")
    return Exit.OK


def _status(status: str) -> str:
    """Return a status as MLflow writes it. Raises UserError for one that no run has."""
    if status.upper() not in _STATUSES:
        known = ", ".join(each.lower() for each in _STATUSES)
        raise UserError(f"job.status={status} is no status of a run", f"give one of {known}.")
    return status.upper()


def _row(run: StoredRun, size: int | None) -> tuple[str, ...]:
    start = run.start_time.astimezone()
    year = "" if start.year == datetime.now(UTC).year else f"{start:%Y-}"
    began = f"{year}{start:%m-%d %H:%M}"
    room = "" if size is None else console.bytes_text(size)
    # What its name says already is not said twice.
    known = f"-{_words(run.name)}-"
    told = {**_facts(run), "port": port_in_name(run.tags.get("port", ""))}
    facts = ", ".join([run.kind.replace("comparison", "compare"), *told.values()])
    more = ", ".join(
        each for each in facts.split(", ") if each and f"-{_words(each)}-" not in known
    )
    name = f"{'  ' if run.parent else ''}{run.name}{f' ({more})' if more else ''}"
    return run.id[:8], _ended(run), began, room, name


def _facts(run: StoredRun) -> dict[str, str]:
    return {name: run.tags.get(name, "") for name in ("model", "scope", "dtype", "device", "port")}


def _ended(run: StoredRun) -> str:
    """Return how a run ended; one that ended well is best described by what came of it."""
    return run.tags.get("verdict", "finished") if run.finished else run.status.lower()


def _words(text: str) -> str:
    """Return a text as runs' names have it: ``range 0..3`` is ``range-0-3``."""
    return re.sub(r"[^\w.]+|\.\.", "-", text.lower())


def _record(run: StoredRun, size: int | None) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.name,
        "kind": run.kind,
        "parent": run.parent,
        **_facts(run),
        "ended": _ended(run),
        "began": run.start_time.isoformat(),
        "bytes": size,
    }


def _hints(runs: Iterable[StoredRun], told: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each tag that is ``told``, by its name, and that no run has."""
    from layerparity.record.verdict import Outcome

    # What a comparison can end with, whether or not one here did.
    verdicts = (Outcome.PASS.value, Outcome.FAIL.value, Outcome.INCONCLUSIVE.value)
    every, said = list(runs), []
    for name, value in told.items():
        # A sweep is found by the kind of its parts, too.
        tags = (name, "holds") if name == "kind" else (name,)
        there = sorted({each.tags[tag] for each in every for tag in tags if each.tags.get(tag)})
        if value is None or value in there:
            continue
        near = nearest(value, [*there, *(verdicts if name == "verdict" else ())])
        listed = f" There is: {', '.join(there[:_SHOWN])}." if there and not near else ""
        said.append(f"No run has job.{name}={value}.{near}{listed}")
    return said
