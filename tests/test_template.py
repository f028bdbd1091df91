"""Template: MLflow migrates a fresh database once for a user; what fresh stores copy is whole."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database, template
from layerparity.tracking.opening import open_store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the templates of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layerparity" / "stores"


@pytest.fixture
def migrations(monkeypatch):
    """The databases that were migrated, by a stand-in for MLflow that takes no time."""
    monkeypatch.setattr(template, "schema_of_mlflow", lambda: "1.0-abc")
    made = []

    def initialise(uri):
        made.append(uri)
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as fresh, fresh:
            fresh.execute("CREATE TABLE experiments (name)")
            fresh.execute("INSERT INTO experiments VALUES ('Default')")

    def make(root):
        root.mkdir()
        database.make(root, initialise)

    return made, make


def dump(root: Path) -> list[str]:
    with closing(sqlite3.connect(root / database.FILE_NAME)) as opened:
        opened.execute(
            "UPDATE experiments SET creation_time = 0, last_update_time = 0, "
            "artifact_location = replace(artifact_location, ?, '')",
            (str(root),),
        )
        # Some migrations write indexes, and the values of a CHECK, in the order of a set.
        return sorted(" ".join(sorted(re.findall(r"\w+", line))) for line in opened.iterdump())


def pragmas(root: Path) -> list[object]:
    named = ("page_size", "encoding", "auto_vacuum", "journal_mode", "user_version")
    with closing(sqlite3.connect(root / database.FILE_NAME)) as opened:
        return [opened.execute(f"PRAGMA {name}").fetchone() for name in named]


def test_a_copied_store_is_the_store_that_mlflow_makes(tmp_path, cache, monkeypatch):
    roots = [tmp_path / name for name in ("migrated", "copied", "without")]
    for root in roots[:2]:
        open_store(TrackingConfig(folder=str(root)))
    assert len(list(cache.glob("*.db"))) == 1
    monkeypatch.setattr(template, "cache_folder", lambda: None)
    open_store(TrackingConfig(folder=str(roots[2])))
    migrated, copied, without = (dump(root) for root in roots)
    assert migrated == copied == without
    assert pragmas(roots[0]) == pragmas(roots[1]) == pragmas(roots[2])
    assert pragmas(roots[1])[3] == ("wal",)


def test_a_template_is_empty_and_of_mlflows_newest_schema(tmp_path, cache):
    open_store(TrackingConfig(folder=str(tmp_path / "runs")))
    (kept,) = cache.glob("*.db")
    with closing(sqlite3.connect(kept)) as opened:
        (revision,) = opened.execute("SELECT version_num FROM alembic_version").fetchone()
        assert opened.execute("SELECT count(*) FROM experiments").fetchone() == (0,)
        assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert template.schema_of_mlflow().split("-")[1:] == [revision]
    assert kept.name.startswith(f"mlflow-{template.schema_of_mlflow()}-")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["half", "empty", "one bit"],
)
def test_a_damaged_template_is_made_again(tmp_path, cache, migrations, damage):
    made, make = migrations
    make(tmp_path / "a")
    (kept,) = cache.glob("*.db")
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    make(tmp_path / "b")
    assert len(made) == 2
    make(tmp_path / "c")
    assert len(made) == 2, "the template was not mended"
    (mended,) = cache.glob("*.db")
    assert (tmp_path / "c" / database.FILE_NAME).read_bytes() == mended.read_bytes()
    assert len(mended.read_bytes()) == len(whole)


def test_a_template_of_another_version_is_left_alone(tmp_path, cache, migrations, monkeypatch):
    made, make = migrations
    make(tmp_path / "a")
    (old,) = cache.glob("*.db")
    for number, other in enumerate(("1.1-abc", "1.0-abd", "1.0"), 2):
        monkeypatch.setattr(template, "schema_of_mlflow", lambda other=other: other)
        make(tmp_path / other)
        assert len(made) == number, "a template of another version was taken"
    assert old.is_file()


def test_a_template_is_nothing_that_a_store_is_written_to(tmp_path, cache, migrations):
    _, make = migrations
    make(tmp_path / "a")
    kept = {path: path.read_bytes() for path in cache.glob("*.db")}
    with closing(sqlite3.connect(tmp_path / "a" / database.FILE_NAME)) as opened, opened:
        opened.execute("INSERT INTO experiments VALUES ('mine')")
    make(tmp_path / "b")
    with closing(sqlite3.connect(tmp_path / "b" / database.FILE_NAME)) as opened:
        assert opened.execute("SELECT * FROM experiments").fetchall() == []
    assert kept == {path: path.read_bytes() for path in cache.glob("*.db")}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_a_cache_that_cannot_be_written_to_costs_time_only(tmp_path, migrations, monkeypatch):
    made, make = migrations
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert len(made) == 2
    assert (tmp_path / "b" / database.FILE_NAME).is_file()


def test_a_cache_that_is_full_or_without_locks_costs_time_only(
    tmp_path, cache, migrations, monkeypatch
):
    made, make = migrations

    def refuse(*_arguments, **_named):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(template, "whole_file", refuse)
        make(tmp_path / "a")
    with monkeypatch.context() as patched:
        patched.setattr(template.FileLock, "acquire", refuse)
        make(tmp_path / "b")
    assert len(made) == 2 and not list(cache.glob("*.db"))
    make(tmp_path / "c")
    assert list(cache.glob("*.db"))


def test_a_read_only_cache_with_a_template_is_used(tmp_path, cache, migrations, monkeypatch):
    made, make = migrations
    make(tmp_path / "a")
    monkeypatch.setattr(template, "_turn", None)
    make(tmp_path / "b")
    assert len(made) == 1


def test_where_templates_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert template.cache_folder() == tmp_path / ".cache" / "layerparity" / "stores"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert template.cache_folder() == tmp_path / "Library" / "Caches" / "layerparity" / "stores"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert template.cache_folder() is None


MAKER = """
import os, signal, sqlite3, sys, time
from contextlib import closing
from pathlib import Path
from layerparity.tracking import database, template

template.schema_of_mlflow = lambda: "1.0-abc"
root, log, ends = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def initialise(uri):
    with open(log, "a") as said:
        said.write("migrated\\n")
    time.sleep(0.3)
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as fresh, fresh:
        fresh.execute("CREATE TABLE experiments (name)")

if ends == "killed":
    def replace(part, path):
        os.kill(os.getpid(), signal.SIGKILL)
    Path.replace = replace
with database.locked(root):
    database.make(root, initialise)
"""


def start(root: Path, cache: Path, log: Path, ends: str = "well") -> subprocess.Popen[bytes]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parents[1])}
    command = [sys.executable, "-c", MAKER, str(root), str(log), ends]
    return subprocess.Popen(command, env=environment)


@pytest.mark.parametrize("stores", [1, 8])
def test_eight_processes_at_once_migrate_once(tmp_path, cache, stores):
    log = tmp_path / "log"
    roots = [tmp_path / f"runs-{number % stores}" for number in range(8)]
    children = [start(root, cache, log) for root in roots]
    assert [child.wait(100) for child in children] == [0] * 8
    assert log.read_text().splitlines() == ["migrated"]
    contents = {(root / database.FILE_NAME).read_bytes() for root in roots}
    assert contents == {path.read_bytes() for path in cache.glob("*.db")} and len(contents) == 1


def test_a_process_that_is_killed_leaves_no_template_and_no_store(tmp_path, cache):
    log = tmp_path / "log"
    assert start(tmp_path / "runs", cache, log, "killed").wait(100) == -signal.SIGKILL
    assert not list(cache.glob("*.db")) and list(cache.glob(".*.part"))
    assert not (tmp_path / "runs" / database.FILE_NAME).exists()
    assert start(tmp_path / "runs", cache, log).wait(100) == 0
    assert len(list(cache.glob("*.db"))) == 1
    assert not list(cache.glob(".*.part")), "what the killed one left was not swept"
    assert log.read_text().splitlines() == ["migrated"] * 2
