"""Store: where runs are begun, found and listed. The tracking room's front door."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.settings.tracking import EMBEDDED, TrackingConfig, read_config
from layerparity.tracking import active, environment, finding, names
from layerparity.tracking import finding as filters
from layerparity.tracking.interrupt import terminable
from layerparity.tracking.stored import FAILED, FINISHED, KILLED, StoredRun, from_mlflow, owner

if TYPE_CHECKING:
    from mlflow.entities import Run

    from layerparity.tracking.active import ActiveRun
    from layerparity.tracking.opening import Connection

MEMBER_TAG = "member."
_PAGE = 1000


def open_store(raw: object) -> Store:
    """Open the store that a `TrackingConfig`, or a config node with its keys, describes.

    Imports mlflow (seconds). Raises UserError where the store cannot be used, with the cure.
    """
    config = read_config(raw)
    environment.prepare(config.timeout_s)
    from layerparity.tracking.opening import open_embedded, open_server

    return Store(open_embedded(config) if config.name == EMBEDDED else open_server(config))


class Store:
    """An open store: one experiment of an embedded database or of a server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def config(self) -> TrackingConfig:
        """What the store was opened with."""
        return self._connection.config

    @contextmanager
    def start(
        self,
        name: str,
        kind: str,
        tags: Mapping[str, object],
        params: Mapping[str, object],
        parent: str | None = None,
    ) -> Iterator[ActiveRun]:
        """Open a run for a block: FINISHED after it, FAILED on an exception, KILLED when stopped.

        While it is open SIGTERM raises SystemExit, so that the run is closed as KILLED.
        """
        with terminable():
            run = self.begin(name, kind, tags, params, parent=parent)
            try:
                yield run
                run.publish()
            except BaseException as error:
                end_quietly(run, error)
                raise
            run.end(FINISHED)

    def begin(
        self,
        name: str,
        kind: str,
        tags: Mapping[str, object],
        params: Mapping[str, object],
        parent: str | None = None,
    ) -> ActiveRun:
        """Open a run that the caller ends; `start` is the safer way."""
        from layerparity.tracking.active import ActiveRun

        stamped = names.own_tags({**tags, "kind": kind, "owner": owner(), **_mlflow_tags(parent)})
        link = self._connection
        with link.plainly():
            info = link.client.create_run(link.experiment_id, run_name=name, tags=stamped).info
        local = active.local_folder(info.artifact_uri)
        if local and not local.parents[2].is_dir():
            raise UserError(
                f"The tracking server keeps artifacts in {local.parents[1]}, which is not on this "
                "machine: start it with --artifacts-destination, or use tracking=embedded."
            )
        folder = local or self.config.root / "spool" / info.run_id
        run = ActiveRun(link, info.run_id, info.run_name, folder, local is None, parent)
        run.log_params(params)
        return run

    def find(self, reference: str, kind: str | None = None) -> list[StoredRun]:
        """Return the run, or the finished children of the sweep, that a user's words name.

        ``reference`` is a run id or its unique beginning, a name (the newest so called), ``latest``
        (the newest finished of ``kind`` that no job made for itself, with its sweep), or a folder;
        of a run and a folder of one name the run is taken, and said. ``latest`` and children are
        finished; any other status is the caller's to judge. Raises UserError.
        """
        return finding.find(self, reference, kind)

    def newest(self, kind: str) -> StoredRun | None:
        """Return the newest finished run of a kind, or None."""
        return self._first([filters.tag_is("kind", kind), filters.status_is(FINISHED)])

    def by_fingerprint(self, fingerprint: str) -> StoredRun | None:
        """Return the newest finished run with this fingerprint, or None."""
        clause = filters.tag_is("fingerprint", fingerprint)
        return self._first([clause, filters.status_is(FINISHED)])

    def runs(self, kind: str | None = None, limit: int = 100) -> list[StoredRun]:
        """Return runs of any status, newest first."""
        return self.search([filters.tag_is("kind", kind)] if kind else [], limit)

    def own_runs(self, kind: str, limit: int = 100) -> list[StoredRun]:
        """Return runs of any status, newest first, but those that a job made for itself.

        Such runs stand under a run that is no sweep: those of a bisection.
        """
        return finding.own(self, [filters.tag_is("kind", kind)], limit)

    def get(self, run_id: str) -> StoredRun | None:
        """Return the run with this full id, or None."""
        return self._first([filters.any_id([run_id])])

    def children(self, run_id: str) -> list[StoredRun]:
        """Return a sweep's runs of any status, adopted ones too, in natural order of names."""
        own = self.search([filters.equals(f"tags.`{names.PARENT_TAG}`", run_id)], _PAGE)
        sweep = self.get(run_id)
        tags = sweep.tags if sweep else {}
        ids = [tag.removeprefix(MEMBER_TAG) for tag in tags if tag.startswith(MEMBER_TAG)]
        adopted = self.search([filters.any_id(ids)], _PAGE) if ids else []
        unique = {run.id: run for run in own + adopted}
        return sorted(unique.values(), key=lambda run: (names.natural(run.name), run.start_time))

    def tag(self, run: StoredRun, tags: Mapping[str, object]) -> None:
        """Set tags of ours on a run that has ended."""
        with self._connection.plainly():
            for tag, value in names.own_tags(tags).items():
                self._connection.client.set_tag(run.id, tag, value)

    def adopt(self, parent: str, run: StoredRun) -> None:
        """Make a run that is reused a member of this sweep too, with its per-layer series."""
        from layerparity.tracking.active import OWN

        client = self._connection.client
        with self._connection.plainly():
            for tag, value in names.own_tags({MEMBER_TAG + run.id: run.name}).items():
                client.set_tag(parent, tag, value)
            for name in client.get_run(run.id).data.metrics:
                if not name.startswith(OWN):
                    client.log_batch(parent, metrics=client.get_metric_history(run.id, name))

    def search(self, clauses: Sequence[str], limit: int) -> list[StoredRun]:
        """Return runs that satisfy every clause of `filters`, newest first."""
        link = self._connection
        with link.plainly():
            found = link.client.search_runs(
                [link.experiment_id],
                " and ".join(clauses),
                max_results=limit,
                order_by=["attributes.start_time DESC"],
            )
        return [self._stored(run) for run in found]

    def _first(self, clauses: Sequence[str]) -> StoredRun | None:
        return next(iter(self.search(clauses, limit=1)), None)

    def _stored(self, run: Run) -> StoredRun:
        locate = partial(self._locate, run.info.run_id, run.info.artifact_uri)
        return from_mlflow(run, self._connection.run_url(run.info.run_id), locate)

    def _locate(self, run_id: str, artifact_uri: str, path: str) -> Path:
        """Return where a file of a run lies, or, for an empty path, its whole folder."""
        local = active.local_folder(artifact_uri)
        if local is None:
            # Single files are kept apart: a folder in the cache is always a whole one.
            cache = self.config.root / "cache"
            target = cache / "files" / run_id / path if path else cache / "runs" / run_id
            with self._connection.plainly():
                return active.download(self._connection.client, run_id, path, target)
        if not local.is_dir():
            raise UserError(f"The artifacts of run {run_id} are gone from {local}: make it again.")
        return local / path


def end_quietly(run: ActiveRun, error: BaseException) -> None:
    """End a run as FAILED or KILLED; a store that fails as well must not hide the error."""
    status = KILLED if isinstance(error, (KeyboardInterrupt, SystemExit)) else FAILED
    try:
        run.end(status, error)
    except UserError as second:
        logging.getLogger(__name__).warning("Run %s could not be closed: %s", run.name, second)


def _mlflow_tags(parent: str | None) -> dict[str, str]:
    tags = {"mlflow.source.name": "layerparity", "mlflow.source.type": "LOCAL"}
    # A container's user need not have a name.
    with suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()
    return {**tags, names.PARENT_TAG: parent} if parent else tags
