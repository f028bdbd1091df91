"""ActiveRun: write an open run, its numbers to MLflow and its files to one folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from layerparity.ground import log
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest, write_text
from layerparity.ground.secrets import redacted
from layerparity.record.folder import RunFolder
from layerparity.record.stored_run import FINISHED, KILLED, TEXT_TAG, StoredRun
from layerparity.tracking import artifacts, interrupted, names, spool, system
from layerparity.tracking.connection import TAGS_PER_REQUEST, Connection
from layerparity.tracking.process import name_of, stop_behind
from layerparity.tracking.stored_runs import RESUMED_BY

if TYPE_CHECKING:
    from mlflow.entities import Metric

# What was said while the run was made, with times.
LOG = "log.txt"
WHOLE_RUN = "summary/"
# Of one run alone, and no part of a sweep's series by layer.
OWN = (WHOLE_RUN, system.PREFIX)
_METRICS_PER_REQUEST = 1000
# MLflow's limits.
_DATASET_NAME, _DIGEST = 500, 36
_T = TypeVar("_T")


@dataclass
class ActiveRun:
    """One open run; its files are written to ``folder``, from where ``remote`` ones are uploaded.

    Every method raises UserError where the disk is full or the server stops answering.
    """

    connection: Connection
    id: str
    name: str
    folder: Path
    remote: bool = False
    parent: str | None = None
    _nonfinite: int = 0
    _tables: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = log.Lines()
        self._heartbeat = interrupted.Heartbeat(self.connection.client, self.id)
        with self.connection.user_errors():
            self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """The run's page in the MLflow UI."""
        return self.link()

    def link(self, tab: str = "") -> str:
        """Return a tab of the run's page: ``model-metrics``, ``artifacts``, ``artifacts/PATH``."""
        return self.connection.run_url(self.id, tab)

    def log_metrics(
        self, values: Iterable[tuple[str, float, int]], tags: Mapping[str, object] | None = None
    ) -> None:
        """Log points (name, value, step), step being the layer, and set ``tags`` with them.

        NaN and Inf are counted in the tag ``nonfinite`` instead of being stored as 1.8e308. In a
        child of a sweep all but ``summary/...`` and ``system/...`` goes onto the parent too: its
        row is the one that charts show.
        """
        from mlflow.entities import Metric

        now, metrics, skipped = int(time.time() * 1000), [], 0
        for name, value, step in values:
            if math.isfinite(value):
                metrics.append(Metric(names.clean(name), float(value), now, int(step)))
            else:
                skipped += 1
        self._nonfinite += skipped
        more = {"nonfinite": self._nonfinite} if skipped else {}
        self._send(self.id, metrics, {**(tags or {}), **more})
        if self.parent:
            self._send(self.parent, [m for m in metrics if not m.key.startswith(OWN)])

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log nested parameters under dotted names; long values are cut (config.yaml has them)."""
        from mlflow.entities import Param

        flat = [Param(*pair) for pair in names.flat_params(params).items()]
        for chunk in _chunks(flat, TAGS_PER_REQUEST):
            self.connection.insist(self.connection.client.log_batch, self.id, params=chunk)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags under our prefix; ``mlflow.note.content`` and its like keep their names."""
        self._send(self.id, tags=tags)

    def rename(self, name: str) -> None:
        """Give the run another name."""
        with self.connection.user_errors():
            self.connection.client.update_run(self.id, name=name)
        self.name = name

    def log_input(self, name: str, digest: str, source: Mapping[str, object]) -> None:
        """Say what the run was fed, as the UI's column Dataset shows it: ``name (digest)``.

        MLflow keeps at most 36 letters of a digest.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        kept = Dataset(name[:_DATASET_NAME], digest[:_DIGEST], "layerparity", json.dumps(source))
        fed = [DatasetInput(kept, [InputTag("mlflow.data.context", "fed")])]
        self.connection.insist(self.connection.client.log_inputs, self.id, fed)

    def share_input(self, run: str) -> None:
        """Say that this run is of what another one of the store was fed."""
        with self.connection.user_errors():
            fed = self.connection.client.get_run(run).inputs.dataset_inputs
        if fed:
            self.connection.insist(self.connection.client.log_inputs, self.id, fed)

    def log_text(self, text: str, path: str, *, tagged: bool = False) -> None:
        """Write text to a path inside the run's folder, without the logins of addresses.

        ``tagged``: keep its hash as a tag, by which `StoredRun.refuse_altered` knows it.
        """
        text = redacted(text)
        with self.connection.user_errors():
            write_text(self.folder / path, text)
        if tagged:
            self.set_tags({f"{TEXT_TAG}{path}": text_digest(text)})

    def log_table(self, columns: Mapping[str, Sequence[object]], path: str) -> None:
        """Write columns of one length as a table that the UI pages through, to a ``.json`` path."""
        rows = [[_plain(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
        self.log_text(json.dumps({"columns": list(columns), "data": rows}, allow_nan=False), path)
        self._tables.append({"path": path, "type": "table"})
        self.set_tags({"mlflow.loggedArtifacts": json.dumps(self._tables)})

    def take_over(self, run: StoredRun, folder: Path) -> None:
        """Make an interrupted run's folder in an embedded store this one's, which is empty yet.

        Both get a tag that names the other. Raises UserError where another process took them.
        """
        try:
            # One step, so that one of several commands takes it; there is no folder left behind.
            folder.rename(self.folder)
        except OSError as error:
            raise UserError(
                f"Run {run.name} ({run.id[:8]}) cannot be resumed ({error.strerror})",
                "another command may go on with it: wait for that one.",
            ) from error
        self.set_tags({"resumed": run.id})
        self.connection.set_tags(run.id, {RESUMED_BY: self.id})

    def keep_log(self) -> None:
        """Write what was said to the run's log, and from now on each line as it is said."""
        with self.connection.user_errors():
            self._lines.write_to(self.folder / LOG)

    def publish(self) -> None:
        """Upload the files where the artifact store is remote; a local one has them already."""
        with self.connection.user_errors():
            write_text(self.folder / LOG, self._lines.text())
            if self.remote:
                artifacts.upload(self.connection.client, self.id, self.folder)

    def end(self, status: str = FINISHED, error: BaseException | None = None) -> None:
        """Close the run: FINISHED, FAILED or KILLED, with the error in one line as a tag."""
        self._heartbeat.stop()
        if error is not None:
            stop = stop_behind(error) if status == KILLED else None
            reason = f"stopped by {name_of(stop)}" if stop else names.one_line(error)
            self.set_tags({"error": reason})
            log.LOGGER.error("the run ends as %s: %s", status, reason)
            # The disk may be what failed.
            with suppress(OSError):
                write_text(self.folder / LOG, self._lines.text())
        self._lines.close()
        with self.connection.user_errors():
            self.connection.client.set_terminated(self.id, status)
            more = ("error",) if error is None else ()
            interrupted.unmark(self.connection, self.id, *more)
        # Files stay where the server went away, or would not take a run that is whole.
        if self.remote and (status == FINISHED or not RunFolder(self.folder).is_run):
            spool.remove(self.folder)

    def _send(
        self, run_id: str, metrics: Sequence[Metric] = (), tags: Mapping[str, object] | None = None
    ) -> None:
        """Log points and set tags, in as few requests as MLflow takes them in: each costs alike."""
        from mlflow.entities import RunTag

        texts = [RunTag(*pair) for pair in names.own_tags(tags or {}).items()]
        # With a request's most points MLflow takes no tag more.
        points = _chunks(metrics, _METRICS_PER_REQUEST - TAGS_PER_REQUEST)
        link = self.connection
        for some, few in zip_longest(points, _chunks(texts, TAGS_PER_REQUEST), fillvalue=()):
            link.insist(link.client.log_batch, run_id, metrics=some, tags=few)


def _plain(cell: object) -> object:
    if isinstance(cell, float) and not math.isfinite(cell):
        return str(cell)
    return cell if isinstance(cell, (str, int, float, bool, type(None))) else str(cell)


def _chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
