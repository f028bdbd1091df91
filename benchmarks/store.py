"""python benchmarks/store.py: what finding and listing runs costs in a store of 2,000 of them.

One run is kept as a job keeps it, and its rows in the database are copied. Each row is the median
of five, beyond start-up: mlflow is imported, and the store is open, but for the first row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, contextmanager, redirect_stdout
from io import StringIO
from sqlite3 import connect
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store
from layerparity.tracking.stored_runs import count_text

ROUNDS = 5
# As a run of several layers has them: a series by layer for two statistics of ten sites, and more.
TAGS, PARAMS, SERIES, LAYERS = 45, 30, 40, 8


def fill(store: Store, count: int) -> None:
    """Keep ``count`` runs, golden and candidate in turn: one through MLflow, the others copied."""
    tags = {f"fact.{at}": "x" * 40 for at in range(TAGS)}
    tags |= {"model": "tiny", "scope": "full", "dtype": "bfloat16", "port": "hf"}
    params = {f"key{at}": "value" for at in range(PARAMS)}
    with store.start("run-0", "golden", {**tags, "fingerprint": "f0"}, params) as run:
        run.log_metrics(
            (f"layer/site{at} rms", 1.0, step) for at in range(SERIES) for step in range(LAYERS)
        )
        run.log_text("{}", "manifest.json")
    with closing(connect(store.config.root / database.FILE_NAME)) as opened, opened:
        for at in range(1, count):
            _copy(opened, run.id, uuid4().hex, at)
    for each in store.runs(limit=count):
        kept = store.config.root / database.ARTIFACTS / each.id / "artifacts"
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "manifest.json").write_text("{}")


def _copy(opened: Any, of: str, run_id: str, at: int) -> None:
    for table in ("runs", "tags", "params", "metrics", "latest_metrics"):
        columns = [row[1] for row in opened.execute(f"PRAGMA table_info({table})")]
        shown = ", ".join("?" if each == "run_uuid" else each for each in columns)
        words = f"INSERT INTO {table} ({', '.join(columns)}) SELECT {shown} FROM {table}"
        opened.execute(f"{words} WHERE run_uuid = ?", (run_id, of))
    opened.execute(
        "UPDATE runs SET name = ?, start_time = start_time + ?, "
        "artifact_uri = replace(artifact_uri, ?, ?) WHERE run_uuid = ?",
        (f"run-{at}", at, of, run_id, run_id),
    )
    kind = "candidate" if at % 2 else "golden"
    own = {"layerparity.kind": kind, "layerparity.fingerprint": f"f{at}"}
    own |= {"layerparity.sequence": count_text(at + 1), "mlflow.runName": f"run-{at}"}
    for name, value in own.items():
        words = "UPDATE tags SET value = ? WHERE key = ? AND run_uuid = ?"
        opened.execute(words, (value, name, run_id))


@contextmanager
def counted() -> Any:
    """Yield the list of statements that any database gets in the block."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    said: list[str] = []

    def note(_connection: object, _cursor: object, words: str, *_: object) -> None:
        said.append(words)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def main() -> None:
    """Fill a store, ask it what commands ask, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = TrackingConfig(folder=folder)
        began = time.monotonic()
        store = open_store(config)
        fill(store, options.runs)
        print(f"{options.runs} runs made in {time.monotonic() - began:.1f} s\n")
        ways: dict[str, Callable[[], object]] = {
            "open the store": lambda: open_store(config),
            "golden=latest": lambda: store.find("latest", "golden"),
            "golden=NAME": lambda: store.find(f"run-{options.runs // 2}", "golden"),
            "reuse=true": lambda: store.by_fingerprint("f1"),
            "a new run's count": store.counted,
            "job=runs": lambda: listed(config, 50),
            "job=runs job.limit=500": lambda: listed(config, 500),
            "job=gc": store.every,
        }
        print("| | seconds | CPU seconds | statements |\n|---|---|---|---|")
        for name, way in ways.items():
            wall, used = [], []
            for _ in range(ROUNDS):
                start, cpu = time.monotonic(), time.process_time()
                with counted() as said:
                    way()
                wall.append(time.monotonic() - start)
                used.append(time.process_time() - cpu)
            seconds, own = statistics.median(wall), statistics.median(used)
            print(f"| {name} | {seconds:.2f} | {own:.2f} | {len(said)} |", flush=True)


def listed(config: TrackingConfig, limit: int) -> None:
    """List runs as the job does."""
    from layerparity.jobs import runs

    job = runs.Settings(limit=limit)
    with redirect_stdout(StringIO()):
        runs.run(SimpleNamespace(job=job, tracking=config))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
