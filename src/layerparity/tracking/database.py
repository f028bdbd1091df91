"""The embedded store's files: one sqlite file in WAL mode beside the artifacts.

mlflow is not imported here: a broken file is recognised before MLflow retries it for minutes.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from layerparity.ground.errors import UserError
from layerparity.tracking import template

FILE_NAME = "mlflow.db"
ARTIFACTS = "artifacts"
LOCK_SECONDS = 300
ELSEWHERE = "or choose another folder with tracking.folder=FOLDER"


def database_uri(root: Path) -> str:
    """Return the tracking URI of the embedded store in a folder."""
    return f"sqlite:///{root / FILE_NAME}"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the store's lock, making the folder if need be.

    Raises UserError where the folder cannot be written to, or another process never lets go.
    """
    # The path becomes part of two addresses, sqlite's and the artifacts'.
    if set(str(root)) & set("?#%"):
        raise UserError(f"The path of a store must be free of ?, # and % ({root}): rename it.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{FILE_NAME}.lock", timeout=LOCK_SECONDS)
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"Another process has held {error.lock_file} for {LOCK_SECONDS} s: end it, {ELSEWHERE}."
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{root} is not a folder: move the file away, {ELSEWHERE}.") from error
    except OSError as error:
        raise UserError(
            f"Cannot write to {root} ({error.strerror}): change its permissions, {ELSEWHERE}."
        ) from error
    try:
        yield
    finally:
        lock.release()


def make(root: Path, initialise: Callable[[str], object]) -> None:
    """Make the database unless it exists; ``initialise`` fills the one at the URI it is given.

    Where a `template` is kept, it is copied, and nothing is initialised. All is done aside and
    moved into place, so an interrupted first start leaves nothing behind.
    """
    target = root / FILE_NAME
    if target.exists():
        return
    with tempfile.TemporaryDirectory(prefix=".first-start-", dir=root) as aside:

        def migrate(path: Path) -> None:
            fresh = Path(aside) / "fresh.db"
            initialise(f"sqlite:///{fresh}")
            with closing(sqlite3.connect(fresh, isolation_level=None)) as database:
                # The default experiment knows where and when it was made: each store gets its own.
                database.execute("DELETE FROM experiments")
                database.execute("VACUUM INTO ?", (str(path),))
            with closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA journal_mode = WAL")

        whole = Path(aside) / "whole.db"
        template.fill(whole, migrate)
        whole.replace(target)


def check(root: Path) -> None:
    """Raise UserError unless the file is a database that can be written to."""
    path = root / FILE_NAME
    try:
        with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            # A write, taken back: only that fails on a database that may just be read.
            database.execute("CREATE TABLE layerparity_write_check (x)")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise UserError(
            f"{path} cannot be used ({error})",
            f"restore it from a backup, move it away, {ELSEWHERE}.",
        ) from error


def relocate(root: Path, experiment_id: str, old: str, new: str) -> None:
    """Point an experiment and its runs at the artifacts beside the database, after a move.

    MLflow stores absolute addresses and offers no way to change them.
    """
    with closing(sqlite3.connect(root / FILE_NAME, timeout=20)) as database, database:
        database.execute(
            "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?",
            (new, int(experiment_id)),
        )
        database.execute(
            "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
            "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
            (new, len(old) + 1, int(experiment_id), len(old) + 1, f"{old}/"),
        )
