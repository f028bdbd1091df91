"""Store: begin, end and tag runs, on top of what reads them."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.ground.secrets import redacted
from layerparity.machine.owner import owner_tag
from layerparity.record.stored_run import FAILED, FINISHED, KILLED, StoredRun
from layerparity.tracking import artifacts, interrupted, lookup, names, spool
from layerparity.tracking.process import stop_behind, terminable
from layerparity.tracking.stored_runs import MEMBER_TAG, StoredRuns

if TYPE_CHECKING:
    from layerparity.tracking.active import ActiveRun


class Store(StoredRuns):
    """An open store: runs are begun and changed here, and those that it holds are read."""

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

        While it is open SIGTERM and SIGHUP raise SystemExit, so that the run is closed as KILLED.
        """
        with terminable():
            run = self.begin(name, kind, tags, params, parent=parent)
            try:
                yield run
                run.publish()
            except BaseException as error:
                end_quietly(run, error)
                if run.remote and isinstance(error, UserError):
                    raise spool.failure(error, run.folder) from error
                raise
            try:
                run.end(FINISHED)
            except UserError as error:
                raise spool.failure(error, run.folder) if run.remote else error from error

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

        ours = {**tags, "kind": kind, interrupted.OWNER: owner_tag()}
        ours |= self.count()
        ours[interrupted.BEAT] = interrupted.now()
        ours |= {"mlflow.source.name": "layerparity", "mlflow.source.type": "LOCAL"}
        # A container's user need not have a name.
        with suppress(KeyError, OSError):
            ours["mlflow.user"] = getpass.getuser()
        if parent:
            ours[names.PARENT_TAG] = parent
        link = self._connection
        with link.user_errors():
            info = link.client.create_run(
                link.experiment_id, run_name=redacted(name), tags=names.own_tags(ours)
            ).info
        local = artifacts.local_folder(info.artifact_uri)
        if local and not local.parents[2].is_dir():
            raise UserError(
                f"The tracking server keeps artifacts in {local.parents[1]}, which is not on this "
                "machine",
                "start it with --artifacts-destination, or use tracking=embedded.",
            )
        folder = local or spool.make_folder(self.config, info.run_id)
        run = ActiveRun(link, info.run_id, info.run_name, folder, local is None, parent)
        try:
            run.log_params(params)
        except BaseException as error:
            end_quietly(run, error)
            raise
        return run

    def find(self, reference: str, kind: str | None = None) -> list[StoredRun]:
        """Return the run, or the finished children of the sweep, that a user's words name.

        ``reference`` is a run id or its unique beginning, a name (the newest so called), ``latest``
        (the newest finished of ``kind`` that no job made for itself, with its sweep), or a folder;
        of a run and a folder of one name the run is taken, and said. ``latest`` and children are
        finished; any other status is the caller's to judge. Raises UserError.
        """
        return lookup.look_up(self, reference, kind)

    def tag(self, run: StoredRun, tags: Mapping[str, object]) -> None:
        """Set tags of ours on a run that has ended."""
        self._connection.set_tags(run.id, tags)

    def delete(self, run: StoredRun) -> None:
        """Let MLflow hold a run as deleted; its files stay where they are."""
        with self._connection.user_errors():
            self._connection.client.delete_run(run.id)

    def adopt(self, parent: str, run: StoredRun) -> None:
        """Make a run that is reused a member of this sweep too, with its per-layer series."""
        from layerparity.tracking.active import OWN

        link = self._connection
        link.set_tags(parent, {MEMBER_TAG + run.id: run.name})
        with link.user_errors():
            for name in link.client.get_run(run.id).data.metrics:
                if not name.startswith(OWN):
                    points = link.client.get_metric_history(run.id, name)
                    link.insist(link.client.log_batch, parent, metrics=points)


def end_quietly(run: ActiveRun, error: BaseException) -> None:
    """End a run as FAILED or KILLED; a store that fails as well must not hide the error."""
    status = KILLED if stop_behind(error) else FAILED
    try:
        run.end(status, error)
    except UserError as second:
        # The next command that opens the store ends the run, and says so.
        logging.getLogger(__name__).debug("Run %s could not be closed: %s", run.name, second)
