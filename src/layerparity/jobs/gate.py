"""Hold a candidate against its golden for CI: a verdict, files for programs, and the series."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.jobs import compare
from layerparity.settings.config import LATEST, Config, RunKind, What
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun

# What CI systems call the commit that they test.
_COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA", "BUILDKITE_COMMIT", "GIT_COMMIT")
_FILES = ("verdict.json", "junit.xml", "report.html", "report.md")
SERIES_FILE = "series.json"


READS = (*compare.READS, "to")


def reads(config: Config) -> tuple[str, ...] | None:
    """Return the keys that it reads; None for all."""
    return None if compare.reads(config) is None else READS


@dataclass
class Settings(compare.Settings):
    """conf/job/gate.yaml: what job=compare has, and what a series is made of."""

    name: str = "gate"
    revision: str | None = key(
        None, "what is judged: a commit, an SDK's version; null: CI's commit, or git's here"
    )
    series: str | None = key(
        None, "name of the series; null: model, scope, dtype and backend of the candidate"
    )
    history: int = key(20, "how many comparisons of the series are listed", least=1, most=1000)


def run(config: Config) -> Exit:
    """Compare, write the files for programs to ``to=``, and say how the series goes.

    The exit status is the verdict's. Raises UserError where ``to`` cannot be written.
    """
    from layerparity.report import series
    from layerparity.report.keep import summarise
    from layerparity.tracking.opening import open_store
    from layerparity.tracking.stored_runs import tag_is

    if config.what is What.weights:
        raise UserError(
            "job=gate judges runs, and what=weights has none", "use job=compare what=weights."
        )
    target = _target(config.to)
    _refuse_unfinished(config)
    kept = compare.compare(config)
    store = open_store(config.tracking)
    made = store.get(kept.run)
    assert made is not None
    told = (made.tags.get(tag, "") for tag in ("model", "scope", "dtype", "backend"))
    name = config.job.series or " ".join(word for word in told if word)
    tags = {series.SERIES: name, series.REVISION: config.job.revision or _commit()}
    store.tag(made, tags)
    wanted = [tag_is("kind", made.kind), tag_is(series.SERIES, name)]
    # A job of CI that is run again judges the same candidate again: both count.
    found = [each for each in store.search(wanted, config.job.history) if each.finished]
    members = sorted(found, key=lambda each: each.order)
    rows = series.rows_of(members)
    console.table(f"Series {name}", list(rows[0]), [list(row.values()) for row in rows])
    for line in series.sentences(members):
        console.say(line)
    summarise("\n" + series.markdown(members, name))
    if target is not None:
        _write(target, made, [_whole(each, row) for each, row in zip(members, rows, strict=True)])
        console.say(f"files:  {target}")
    return kept.exit


def _refuse_unfinished(config: Config) -> None:
    """Raise UserError where the newest candidate did not finish: an older one is no revision's."""
    from layerparity.tracking.opening import open_to_read

    if config.candidate not in (None, LATEST):
        return
    asked = compare.asked(config)
    for run in open_to_read(config.tracking).own_runs(RunKind.candidate.value, 1):
        if not run.finished and asked.may_be(run):
            raise UserError(
                f"The newest candidate, '{run.name}' ({run.id[:8]}), is {run.status}: no older one "
                "is judged in its place",
                "make it again, or name the run that is meant: candidate=<run>.",
            )


def _commit() -> str:
    """Return the commit that CI tests, else that of the folder where the command was typed."""
    from layerparity.ground.resources import commit_of

    named = (os.environ.get(name, "") for name in _COMMITS)
    return next((each for each in named if each), "") or commit_of(Path.cwd()) or "unknown"


def _target(to: str | None) -> Path | None:
    """Make the folder for programs' files. Raises UserError where that fails."""
    if to is None:
        return None
    try:
        Path(to).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"to={to} cannot be written ({error.strerror})", "name a folder."
        ) from error
    return Path(to)


def _whole(member: StoredRun, row: dict[str, str]) -> dict[str, str | float | None]:
    """Return a row for programs: commit and id in full, versions of packages, numbers as such.

    What is not finite, or not known, is None: JSON has no such number.
    """
    from layerparity.report.series import LIMIT, REVISION, WORST

    tags = member.tags
    versions = {k: v for k, v in tags.items() if k.startswith("version.")}
    numbers = {name: float(tags.get(name, "nan")) for name in (WORST, LIMIT)}
    told = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {**row, "revision": tags[REVISION], "run": member.id, **told, **versions}


def _write(target: Path, made: StoredRun, rows: list[dict[str, str | float | None]]) -> None:
    from layerparity.ground.files import write_text

    for name in _FILES:
        write_text(target / name, made.file(name).read_text(encoding="utf-8"))
    write_text(target / SERIES_FILE, json.dumps(rows, indent=1) + "\n")
