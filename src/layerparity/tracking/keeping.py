"""Keeping: which runs go, and why every other one stays.

Nothing goes that a run which stays refers to. Pure: it reads tags, and changes nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from layerparity.ground.errors import UserError
from layerparity.record.stored_run import RUNNING, StoredRun
from layerparity.tracking.stored_runs import MEMBER_TAG

_AGE = re.compile(r"([0-9]{1,5})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
# The tags of a run that hold ids of others, and what it has to do with those.
_REFERENCES = {
    "inputs_from": "was fed by it",
    "golden": "judges by it",
    "candidate": "judges it",
    "beside": "judges it, too",
    "judged_again": "judges it again",
}


@dataclass(frozen=True)
class RunFate:
    """A run, and why it stays: it was not asked for (``misfit``), or ``why`` although it was.

    With neither it goes. ``by`` is the id of the run that stays and refers to it.
    """

    run: StoredRun
    misfit: str = ""
    why: str = ""
    by: str = ""

    @property
    def goes(self) -> bool:
        """Whether the run is removed."""
        return not (self.misfit or self.why)


def age(text: str) -> timedelta:
    """Return ``14d`` (m minutes, h hours, d days, w weeks) as a span of time. Raises UserError."""
    read = _AGE.fullmatch(text)
    if read is None:
        raise UserError(f"job.older_than={text[:40]} is no age", "write it as 12h, 14d or 8w.")
    return timedelta(**{_UNITS[read[2]]: int(read[1])})


def fates(
    runs: Sequence[StoredRun],
    gone: Sequence[StoredRun],
    asked: timedelta | Collection[str],
    spared: Mapping[str, str],
) -> list[RunFate]:
    """Return what becomes of each run: ``runs`` newest first, then those that are ``gone``.

    ``gone`` are held as deleted already, and their files are left. ``asked`` is how long ago runs
    began that shall go, or the very ids. A part of a run, as of a sweep, goes or stays with it; one
    that ended early may go alone. ``spared`` says why a run stays whatever is asked, by its id.
    """
    by_id = {run.id: run for run in runs}
    misfits = _misfits(runs, by_id, asked)
    why = {run.id: "it is running" for run in (*runs, *gone) if run.status == RUNNING}
    why |= {name: reason for name, reason in spared.items() if not misfits.get(name)}
    refers, by = _references(runs, by_id), dict[str, str]()
    stay = [run for run in runs if misfits[run.id] or run.id in why]
    for run in stay:  # It grows: whatever a run refers to that stays, stays as well.
        for other, how in refers[run.id].items():
            if other not in why and not misfits.get(other):
                why[other] = f"{run.kind or 'run'} {run.name} ({run.id[:8]}) {how}"
                by[other] = run.id
                if other in by_id:
                    stay.append(by_id[other])
    return [
        RunFate(run, misfits.get(run.id, ""), why.get(run.id, ""), by.get(run.id, ""))
        for run in (*runs, *gone)
    ]


def _misfits(
    runs: Sequence[StoredRun], by_id: Mapping[str, StoredRun], asked: timedelta | Collection[str]
) -> dict[str, str]:
    """Return of each run why it was not asked for, by its id; empty where it was."""
    now, misfits = datetime.now(tz=UTC), {}
    for run in runs:
        if isinstance(asked, timedelta):
            young = now - run.start_time < asked
            misfits[run.id] = "it is younger than job.older_than" if young else ""
        else:
            misfits[run.id] = "" if run.id in asked else "it is not named"
    alone = dict(misfits)
    for run in runs:
        top, seen = run, {run.id}
        while (above := by_id.get(top.parent or "")) is not None and above.id not in seen:
            top = above
            seen.add(top.id)
        if top is not run and (run.finished or alone[run.id]):
            of = f"it is a part of {top.name} ({top.id[:8]})"
            misfits[run.id] = of if alone[top.id] else ""
    return misfits


def _references(
    runs: Sequence[StoredRun], by_id: Mapping[str, StoredRun]
) -> dict[str, dict[str, str]]:
    """Return of each run which others it needs, and why, by their ids.

    A run needs its finished parts, and a part, while it is there, the run that it is a part of.
    """
    refers: dict[str, dict[str, str]] = defaultdict(dict)
    for run in runs:
        for tag, how in _REFERENCES.items():
            refers[run.id] |= dict.fromkeys(run.tags.get(tag, "").split(), how)
        members = [tag.removeprefix(MEMBER_TAG) for tag in run.tags if tag.startswith(MEMBER_TAG)]
        refers[run.id] |= dict.fromkeys(members, "has it as a part")
        above = by_id.get(run.parent or "")
        if above is not None:
            refers[run.id][above.id] = "is a part of it"
            if run.finished:
                refers[above.id][run.id] = "has it as a part"
    return refers
