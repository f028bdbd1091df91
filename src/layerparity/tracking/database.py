"""The embedded store's files: one sqlite database beside the artifacts.

It has a write-ahead log, so that readers do not wait; on a network file system a rollback journal.

mlflow is not imported here: a broken file is recognised before MLflow retries it for minutes.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure
from layerparity.machine.file_system import is_network, kind_of
from layerparity.tracking import template

FILE_NAME = "mlflow.db"
ARTIFACTS = "artifacts"
LOCK_SECONDS = 300
CHECK_SECONDS = 2.0
_ASIDE = ".first-start-"
# Those of MLflow's that we use, in every version.
_TABLES = {"experiments", "experiment_tags", "runs", "tags", "params", "metrics", "latest_metrics"}
# What the run that began last says of the MLflow that kept it.
_NEWEST_MLFLOW = (
    "SELECT tags.value FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid "
    "WHERE tags.key = 'layerparity.version.mlflow' ORDER BY runs.start_time DESC LIMIT 1"
)
_LOGS = ("-wal", "-shm", "-journal")
ELSEWHERE = "or choose another folder with tracking.folder=FOLDER"
# With less than this free, what sqlite calls an error of the disk is a full one.
_FULL_BYTES = 1 << 20
_LOCKED = "database is locked"
_FULL = ("the disk is full", "free some disk space")
# By what sqlite says: what is wrong, and what to do about it.
_SIGNS = {
    "disk is full": _FULL,
    "disk I/O error": ("the disk reports an error", "check it"),
    "readonly database": ("the database cannot be written to", "change its permissions"),
    "unable to open database": ("the database cannot be opened", "change the folder's permissions"),
    _LOCKED: ("another process keeps the database locked", "end it"),
}
# The device and the number of a file.
Identity = tuple[int, int]


def database_uri(root: Path) -> str:
    """Return the tracking URI of the embedded store in a folder."""
    return f"sqlite:///{root / FILE_NAME}"


def refuse_path(root: Path) -> None:
    """Raise UserError for a path that cannot be part of an address: sqlite's, the artifacts'."""
    if set(str(root)) & set("?#%"):
        raise UserError(f"The path of a store must be free of ?, # and % ({root})", "rename it.")


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the store's lock, making the folder if need be.

    Raises UserError where the folder cannot be written to, or another process never lets go.
    """
    refuse_path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{FILE_NAME}.lock", timeout=LOCK_SECONDS)
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"Another process has held {error.lock_file} for {LOCK_SECONDS} s",
            f"end it, {ELSEWHERE}.",
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{root} is not a folder", f"move the file away, {ELSEWHERE}.") from error
    except OSError as error:
        raise UserError(
            f"Cannot write to {root} ({error.strerror})", f"{disk_cure(error)}, {ELSEWHERE}."
        ) from error
    try:
        yield
    finally:
        lock.release()


def make(root: Path, initialise: Callable[[str], object]) -> None:
    """Make the database unless it exists; ``initialise`` fills the one at the URI it is given.

    Where a `template` is kept, it is copied, and nothing is initialised. All is done aside and
    moved into place, so an interrupted first start leaves nothing behind; what a killed one left
    is removed.
    """
    target = root / FILE_NAME
    # The lock is ours: nobody begins here now.
    for left in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        return
    _put_aside_logs(target)
    with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=root) as aside:

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
        _set_journal(whole, root)
        whole.replace(target)


def _put_aside_logs(target: Path) -> None:
    """Rename the log of a database that was moved away: sqlite would play it into the next one."""
    for end in _LOGS:
        log = target.with_name(target.name + end)
        if log.exists():
            log.rename(log.with_name(f"{log.name}.of-the-former-{time.time_ns()}"))


def _set_journal(path: Path, root: Path) -> None:
    mode = "delete" if is_network(kind_of(root)) else "wal"
    with closing(sqlite3.connect(path, timeout=20)) as database:
        if database.execute("PRAGMA journal_mode").fetchone() != (mode,):
            # Who has it open keeps it as it is; whoever comes last changes it.
            with suppress(sqlite3.OperationalError):
                database.execute("PRAGMA busy_timeout = 0")
                database.execute(f"PRAGMA journal_mode = {mode}")


def check(root: Path) -> None:
    """Raise UserError unless the file is a whole database that can be written to.

    Its pages are read, for at most `CHECK_SECONDS`: damage is better found before a run than after.
    """
    path = root / FILE_NAME
    try:
        _set_journal(path, root)
        with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as database:
            problem = _damage(database)
            if problem:
                raise sqlite3.DatabaseError(problem)
            _refuse_schema(root, database)
            database.execute("BEGIN IMMEDIATE")
            # A write, taken back: only that fails on a database that may just be read.
            database.execute("CREATE TABLE layerparity_write_check (x)")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise explained(root, error) or UserError(
            f"{path} cannot be used ({error})",
            "restore it from a backup, move it away with its -wal, -shm and -journal, "
            f"{ELSEWHERE}.",
        ) from error


def _refuse_schema(root: Path, database: sqlite3.Connection) -> None:
    """Raise UserError for a database of another MLflow, which names both versions and the cure.

    MLflow itself would migrate one of an older version where a table of its own is not there, and
    whoever still uses that version would lose the store.
    """
    if not database.execute(
        "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
    ).fetchone():
        return
    (schema,) = database.execute("SELECT version_num FROM alembic_version").fetchone() or ("",)
    age = template.age_of_schema(schema)
    if not age:
        return
    kept = database.execute(_NEWEST_MLFLOW).fetchone()
    kept = f"; its newest run was kept by MLflow {kept[0]}" if kept else ""
    cure = f"install that version, {ELSEWHERE}."
    if age == template.OLDER:
        upgrade = f"run 'mlflow db upgrade {database_uri(root)}' with this one"
        cure = f"end whatever writes to it, copy the folder, {upgrade}, or {cure}"
    raise UserError(
        f"The runs in {root} cannot be used: {age} version of MLflow made their database (schema "
        f"{schema}{kept}), and this is MLflow {template.mlflow_version()}",
        cure,
    )


def explained(root: Path, error: Exception) -> UserError | None:
    """Return what is said of an error of sqlite's, whoever wraps it; None for one not known."""
    sign = next((each for each in _SIGNS if each in str(error)), None)
    if sign is None:
        return None
    what, cure = _SIGNS[sign]
    with suppress(OSError):
        if sign != _LOCKED and shutil.disk_usage(root).free < _FULL_BYTES:
            what, cure = _FULL
    return UserError(f"The runs in {root} cannot be used: {what}", f"{cure}, {ELSEWHERE}.")


def identity(root: Path) -> Identity | None:
    """Return what tells the database from any other file; None where there is none."""
    with suppress(OSError):
        state = (root / FILE_NAME).stat()
        return state.st_dev, state.st_ino
    return None


def gone(root: Path) -> UserError:
    """Return what is said where a store vanished that was open."""
    path = root / FILE_NAME
    what = path if root.is_dir() else root
    how = "replaced by another" if path.exists() else "removed, moved or unmounted"
    return UserError(
        f"{what} was {how} while this command ran",
        f"bring it back and run the command again, {ELSEWHERE}.",
    )


def _damage(database: sqlite3.Connection) -> str:
    """Return what is wrong with a database's pages and tables; empty where nothing is.

    Empty as well where time runs out.
    """
    end = time.monotonic() + CHECK_SECONDS
    database.set_progress_handler(lambda: time.monotonic() > end, 10_000)
    try:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        # A file without any is what MLflow fills.
        if lacking := _TABLES - tables if tables else ():
            return f"it lacks the table '{min(lacking)}'"
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        return ""
    finally:
        database.set_progress_handler(None, 0)
    return "" if found == "ok" else " ".join(str(found).split())


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
