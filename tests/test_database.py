"""The embedded database: moved away, damaged, on a network file system."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stores import fresh_store

from layerparity.ground.errors import UserError
from layerparity.tracking import database


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a run, as a process that ended leaves it: in one file that nobody has open."""
    fresh_store(tmp_path / "open").begin("mine", "golden", {}, {}).end()
    with closing(sqlite3.connect(tmp_path / "open" / database.FILE_NAME)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (tmp_path / "runs").mkdir()
    shutil.copy(tmp_path / "open" / database.FILE_NAME, tmp_path / "runs")
    return tmp_path / "runs"


def names(root: Path) -> list[str]:
    return [run.name for run in fresh_store(root).runs()]


def test_the_log_of_a_database_that_was_moved_away_is_not_played_into_the_next(
    root: Path, tmp_path: Path
) -> None:
    """As after a kill: the log of the last writer stays beside the database."""
    path = root / database.FILE_NAME
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("CREATE TABLE left_behind (x)")
        writer.commit()
        log = Path(f"{path}-wal")
        assert log.stat().st_size > 0
        kept = {end: Path(f"{path}{end}").read_bytes() for end in ("-wal", "-shm")}
    left = tmp_path / "left"
    left.mkdir()
    for end, content in kept.items():
        (left / f"{database.FILE_NAME}{end}").write_bytes(content)
    assert names(left) == []
    fresh_store(left).begin("next", "golden", {}, {}).end()
    assert names(left) == ["next"]
    (aside,) = left.glob("mlflow.db-wal.of-the-former-*")
    assert aside.read_bytes() == kept["-wal"]


def test_a_rollback_journal_is_put_aside_as_well(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db-journal").write_bytes(b"of a database that was moved away")
    assert names(tmp_path) == []
    assert [*tmp_path.glob("mlflow.db-journal.of-the-former-*")]
    assert not (tmp_path / "mlflow.db-journal").exists()


def test_what_a_killed_first_start_left_is_removed(root: Path, tmp_path: Path) -> None:
    for folder in (root, tmp_path / "fresh"):
        half = folder / ".first-start-abcd1234" / "fresh.db"
        half.parent.mkdir(parents=True)
        half.write_bytes(b"half")
        names(folder)
        assert not half.parent.exists()


def test_a_store_that_somebody_has_open_keeps_its_log(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "kind_of", lambda folder: "nfs4")
    with closing(sqlite3.connect(root / database.FILE_NAME)) as reader:
        reader.execute("SELECT count(*) FROM runs").fetchone()
        assert names(root) == ["mine"]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_database_is_found_before_anything_is_computed(
    root: Path, seed: int, cli: Callable[..., Any]
) -> None:
    path, choose = root / database.FILE_NAME, random.Random(seed)
    content = bytearray(path.read_bytes())
    # A page of a table or an index, whole: those that hold nothing yet are most of a fresh store.
    page = choose.randrange(1, len(content) // 4096)
    content[page * 4096 : page * 4096 + 4096] = choose.randbytes(4096)
    path.write_bytes(content)
    ended = cli("backend=gpu", "device_map=cpu", f"tracking.folder={root}")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.out + ended.err
    assert "mlflow.db cannot be used" in ended.err
    assert "blocks" not in ended.out


@pytest.mark.parametrize("table", ["experiments", "runs", "tags"])
def test_a_database_without_a_table_is_damaged(root: Path, table: str) -> None:
    with closing(sqlite3.connect(root / database.FILE_NAME)) as opened:
        opened.execute(f"DROP TABLE {table}")
    with pytest.raises(UserError, match=rf"cannot be used \(it lacks the table '{table}'\): res"):
        fresh_store(root)


def test_a_check_that_takes_too_long_lets_the_command_go_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECK_SECONDS", 0.0)
    database.check(root)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("nfs4", "delete"), ("cifs", "delete"), ("fuse.sshfs", "delete"), ("wekafs", "delete")),
        ("ext4", "wal"),
    ],
)
def test_a_network_file_system_has_no_write_ahead_log(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    monkeypatch.setattr(database, "kind_of", lambda folder: kind)
    for folder in (root, tmp_path / "fresh"):
        assert isinstance(names(folder), list)
        with closing(sqlite3.connect(folder / database.FILE_NAME)) as opened:
            assert opened.execute("PRAGMA journal_mode").fetchone() == (mode,)


def test_a_database_in_use_is_not_said_to_be_damaged(root: Path) -> None:
    with closing(sqlite3.connect(root / database.FILE_NAME, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(UserError, match="locked"):
            database.check(root)
