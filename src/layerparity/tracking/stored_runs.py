"""StoredRuns: the reading half of a store: its runs, listed, looked up and turned into ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.record.stored_run import FINISHED, INTERRUPTED, KILLED, RUNNING, StoredRun
from layerparity.settings.tracking import SERVER, TrackingConfig
from layerparity.tracking import (
    artifacts,
    database,
    fetched,
    in_use,
    interrupted,
    names,
    ranges,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

    from layerparity.tracking.connection import Connection

MEMBER_TAG = "member."
# Of a run that another one went on with: which.
RESUMED_BY = "resumed_by"
SWEEP = "sweep"
PAGE = 1000
# How many runs are looked at where the newest ones are all some job's own.
_MANY = 1000
# A run's count, in so many digits that its text sorts as its number does.
_SEQUENCE = "sequence"
_DIGITS = 12
_COUNT = re.compile(rf"[0-9]{{{_DIGITS}}}")
# What others logged has no count: it comes after all others, by the clock.
_BY_CLOCK = "attributes.start_time DESC"
_NEWEST_FIRST = (f"tags.`{names.PREFIX}{_SEQUENCE}` DESC", _BY_CLOCK)


class StoredRuns:
    """The runs of one experiment, of an embedded database or of a server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def config(self) -> TrackingConfig:
        """What the store was opened with."""
        return self._connection.config

    @property
    def runs_url(self) -> str:
        """The page that lists the runs, with the columns that tell them apart."""
        return self._connection.runs_url()

    def search(self, clauses: Sequence[str], limit: int) -> list[StoredRun]:
        """Return runs that satisfy every clause, newest first."""
        link = self._connection
        with link.user_errors():
            page = link.client.search_runs(
                [link.experiment_id],
                " and ".join(clauses),
                max_results=limit,
                order_by=list(_NEWEST_FIRST),
            )
        return [self._stored(run) for run in page]

    def every(self, *, deleted: bool = False) -> list[StoredRun]:
        """Return all runs, newest first, however many; or those that MLflow holds as deleted."""
        from mlflow.entities import ViewType

        link, found, token = self._connection, [], None
        view = ViewType.DELETED_ONLY if deleted else ViewType.ACTIVE_ONLY
        while token != "":
            with link.user_errors():
                page = link.client.search_runs(
                    [link.experiment_id], "", view, PAGE, [_BY_CLOCK], token
                )
            found += [self._stored(run) for run in page]
            token = page.token or ""
        # Not MLflow's to sort by a tag: for each page it looks at every pair of runs.
        return sorted(found, key=lambda run: run.order, reverse=True)

    def filtered(self, clauses: Sequence[str], words: str | None, limit: int) -> list[StoredRun]:
        """Return `search`'s runs that MLflow finds by a user's ``words`` as well. UserError."""
        from mlflow.exceptions import MlflowException

        try:
            return self.search([*clauses, *([words] if words else [])], limit)
        except MlflowException as error:
            if words is None or error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise UserError(
                f"MLflow cannot search by job.filter={words} ({names.one_line(error)})",
                "write it as in MLflow's search box: tags.`layerparity.kind` = 'golden'.",
            ) from error

    def size(self, run: StoredRun) -> int | None:
        """Return the bytes of a run's files; None where a server has them, or they are gone."""
        if self.config.name == SERVER:
            return None
        # Not by `run.folder`: a run that is only listed is not in use.
        folder = self.config.root / database.ARTIFACTS / run.id
        with suppress(OSError):
            if folder.is_dir():
                return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        return None

    def counted(self) -> int:
        """Return the count of the run that began last, 0 where none was counted."""
        link = self._connection
        with link.user_errors():
            kept = link.client.get_experiment(link.experiment_id).tags
        told = _count(kept.get(names.PREFIX + _SEQUENCE, ""))
        # An experiment that holds no count has it in its runs, if it has any.
        return told or next((run.sequence for run in self.search([], limit=1)), 0)

    def count(self) -> dict[str, str]:
        """Count one more run; return the tag that it has its count in.

        Two that begin at once may share a count; then the clock decides between them.
        """
        tag = {_SEQUENCE: count_text(self.counted() + 1)}
        link = self._connection
        for name, text in names.own_tags(tag).items():
            link.insist(link.client.set_experiment_tag, link.experiment_id, name, text)
        return tag

    def newest(self, kind: str) -> StoredRun | None:
        """Return the newest finished run of a kind, or None."""
        return self._first([tag_is("kind", kind), status_is(FINISHED)])

    def by_fingerprint(self, fingerprint: str) -> StoredRun | None:
        """Return the newest finished run with this fingerprint, or None."""
        clause = tag_is("fingerprint", fingerprint)
        return self._first([clause, status_is(FINISHED)])

    def unfinished(self, fingerprint: str) -> list[StoredRun]:
        """Return the runs of a fingerprint that ended early, from the newest to a finished one."""
        runs = self.search([tag_is("fingerprint", fingerprint)], PAGE)
        since = takewhile(lambda run: run.status != FINISHED, runs)
        # What another run went on with has no files any more.
        return [run for run in since if run.status != RUNNING and RESUMED_BY not in run.tags]

    def own_folder(self, run: StoredRun) -> Path:
        """Return a run's folder in an embedded store. Raises UserError for one elsewhere.

        Whoever made the store may have named any folder as a run's.
        """
        folder = run.folder.resolve()
        if folder != (self.config.root / database.ARTIFACTS).resolve() / run.id / "artifacts":
            raise UserError(f"its folder is not the store's own ({folder})")
        return folder

    def runs(self, kind: str | None = None, limit: int = 100) -> list[StoredRun]:
        """Return runs of any status, newest first."""
        return self.search([tag_is("kind", kind)] if kind else [], limit)

    def own(self, clauses: Sequence[str], limit: int) -> list[StoredRun]:
        """Return runs that satisfy every clause, newest first, but those a job made for itself.

        A job such as a bisection makes runs under its own, which is no sweep. A run whose sweep was
        deleted stands for itself.
        """
        for looked_at in (2 * limit, max(_MANY, 2 * limit)):
            runs = self.search(clauses, looked_at)
            above = {run.parent for run in runs if run.parent}
            known = self.search([any_id(sorted(above))], len(above)) if above else []
            kinds = {parent.id: parent.kind for parent in known}
            own = [run for run in runs if kinds.get(run.parent or "", SWEEP) == SWEEP]
            if len(own) >= limit or len(runs) < looked_at:
                break
        return [run if run.parent in kinds else replace(run, parent=None) for run in own[:limit]]

    def own_runs(self, kind: str, limit: int = 100) -> list[StoredRun]:
        """Return `own` runs of a kind and of any status, newest first."""
        return self.own([tag_is("kind", kind)], limit)

    def get(self, run_id: str) -> StoredRun | None:
        """Return the run with this full id, or None."""
        return self._first([any_id([run_id])])

    def children(self, run_id: str) -> list[StoredRun]:
        """Return a sweep's runs of any status, adopted ones too, in natural order of names."""
        own = self.search([equals(f"tags.`{names.PARENT_TAG}`", run_id)], PAGE)
        sweep = self.get(run_id)
        tags = sweep.tags if sweep else {}
        ids = [tag.removeprefix(MEMBER_TAG) for tag in tags if tag.startswith(MEMBER_TAG)]
        adopted = self.search([any_id(ids)], PAGE) if ids else []
        unique = {run.id: run for run in own + adopted}
        return sorted(unique.values(), key=lambda run: (names.natural(run.name), run.order))

    def _first(self, clauses: Sequence[str]) -> StoredRun | None:
        return next(iter(self.search(clauses, limit=1)), None)

    def _stored(self, run: Run) -> StoredRun:
        """Return MLflow's run as ours."""
        info, prefix = run.info, names.PREFIX
        tags = {k.removeprefix(prefix): v for k, v in run.data.tags.items() if k.startswith(prefix)}
        started = datetime.fromtimestamp(info.start_time / 1000, tz=UTC)
        gone = info.status == RUNNING and interrupted.is_gone(tags, started)
        if gone:
            # Its process may have ended it, and then itself, after it was looked up here.
            with self._connection.user_errors():
                now = self._connection.client.get_run(info.run_id)
            if now.info.status != RUNNING:
                return self._stored(now)
        marked = info.status == KILLED and interrupted.TAG in tags
        return StoredRun(
            id=info.run_id,
            name=info.run_name or "",
            status=INTERRUPTED if gone or marked else info.status,
            tags=tags,
            start_time=started,
            sequence=_count(tags.get(_SEQUENCE, "")),
            url=self._connection.run_url(info.run_id),
            parent=run.data.tags.get(names.PARENT_TAG),
            locate=partial(self._locate, info.run_id, info.artifact_uri),
            locate_tensor=self._by_ranges(info.run_id, info.artifact_uri),
        )

    def _by_ranges(self, run_id: str, artifact_uri: str) -> Callable[[str, str], Path] | None:
        """Return what fetches a tensor of a run whose files are elsewhere; None for files here."""
        if artifacts.local_folder(artifact_uri) is not None:
            return None
        return ranges.RemoteTensors(self._connection, run_id, artifact_uri).locate

    def _locate(self, run_id: str, artifact_uri: str, path: str) -> Path:
        """Return where a file of a run lies, or, for an empty path, its whole folder."""
        local = artifacts.local_folder(artifact_uri)
        if local is None:
            # Single files are kept apart: a folder in the cache is always a whole one.
            cache = fetched.folder(self.config.root)
            target = cache / "files" / run_id / path if path else cache / "runs" / run_id
            with self._connection.user_errors():
                return artifacts.download(
                    self._connection.client, run_id, path, target, self.config
                )
        if not in_use.hold(self.config.root, run_id):
            raise UserError(f"Run {run_id} is being removed by job=gc", "name another run.")
        if not local.is_dir():
            raise UserError(
                f"The artifacts of run {run_id} are gone from {local}", "make it again."
            )
        return local / path


def count_text(count: int) -> str:
    """Return a run's count as the text that its tag holds."""
    return f"{min(count, 10**_DIGITS - 1):0{_DIGITS}d}"


def _count(text: str) -> int:
    return int(text) if _COUNT.fullmatch(text) else 0


# Quotes and backslashes cannot be escaped in this language; % and _ are wildcards of LIKE.
_AWKWARD = re.compile(r"['\"\\\n\r;]")


def equals(field: str, value: str) -> str:
    """Return a clause for ``field`` being ``value``; an awkward character matches any one."""
    if not _AWKWARD.search(value):
        return f"{field} = '{value}'"
    return f"{field} LIKE '{_AWKWARD.sub('_', value)}'"


def tag_is(name: str, value: str) -> str:
    """Return a clause for one of our tags, named without its prefix."""
    return equals(f"tags.`{names.PREFIX}{name}`", value)


def id_starts(prefix: str) -> str:
    """Return a clause for run ids that begin with hexadecimal digits."""
    return f"attributes.run_id LIKE '{prefix}%'"


def status_is(status: str) -> str:
    """Return a clause for MLflow's own status."""
    return f"attributes.status = '{status}'"


def any_id(run_ids: list[str]) -> str:
    """Return a clause for one of several run ids."""
    return f"attributes.run_id IN ({', '.join(repr(each) for each in run_ids)})"
