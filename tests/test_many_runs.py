"""A store of many runs is asked as often as one of few: what finds and lists them does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Cursor
from threading import get_ident

import pytest
from conftest import Ended
from stores import fresh_store

from layerparity.tracking.store import Store

FEW, MANY = 4, 40


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield the list of what databases are asked in the block, by the thread that runs it.

    A run that another test left open has its heartbeat in a thread of its own.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    asked: list[str] = []
    own = get_ident()

    def note(_connection: object, _cursor: object, words: str, *_: object) -> None:
        if get_ident() == own:
            asked.append(words)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@contextmanager
def instructions() -> Iterator[list[None]]:
    """Yield a list with an entry for each 100 instructions that sqlite carries out in the block."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    done: list[None] = []

    def watch(_connection: object, cursor: Cursor, *_: object) -> None:
        cursor.connection.set_progress_handler(lambda: done.append(None), 100)

    def unwatch(_connection: object, cursor: Cursor, *_: object) -> None:
        cursor.connection.set_progress_handler(None, 0)

    event.listen(Engine, "before_cursor_execute", watch)
    event.listen(Engine, "after_cursor_execute", unwatch)
    try:
        yield done
    finally:
        event.remove(Engine, "before_cursor_execute", watch)
        event.remove(Engine, "after_cursor_execute", unwatch)


def fill(store: Store, first: int, last: int) -> None:
    for at in range(first, last):
        kind = "candidate" if at % 2 else "golden"
        with store.start(f"run-{at}", kind, {"fingerprint": f"f{at}", "port": "hf"}, {}):
            pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return fresh_store(tmp_path / "many")


def test_finding_and_listing_runs_asks_no_more_of_many(
    store: Store, cli: Callable[..., Ended]
) -> None:
    def listed() -> None:
        shown = cli("job=runs", f"tracking.folder={store.config.root}")
        assert shown.exit == 0, shown.err

    ways: dict[str, Callable[[], object]] = {
        "latest": lambda: store.find("latest", "golden"),
        "name": lambda: store.find("run-0", "golden"),
        "fingerprint": lambda: store.by_fingerprint("f1"),
        "count": store.counted,
        "newest": lambda: store.newest("candidate"),
        "every": store.every,
        "job=runs": listed,
    }

    def counts() -> dict[str, int]:
        found = {}
        for name, way in ways.items():
            with statements() as asked:
                way()
            found[name] = len(asked)
        return found

    fill(store, 0, FEW)
    few = counts()
    fill(store, FEW, MANY)
    assert counts() == few
    assert all(0 < count <= 40 for count in few.values()), few
    # Where the newest golden is the one, no other is read: one search for it, one for a sweep.
    assert few["latest"] <= 20


def test_runs_are_counted_on_where_the_experiment_holds_no_count(store: Store) -> None:
    """So it is in a store of an older version; a new run would else be taken for an old one."""
    fill(store, 0, 3)
    link = store._connection
    link.client.set_experiment_tag(link.experiment_id, "layerparity.sequence", "")
    fill(store, 3, 4)
    assert [run.name for run in store.every()] == ["run-3", "run-2", "run-1", "run-0"]
    assert store.counted() == 4


def test_more_runs_than_a_page_holds_are_all_listed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerparity.tracking import stored_runs

    fill(store, 0, 7)
    monkeypatch.setattr(stored_runs, "PAGE", 3)
    assert [run.name for run in store.every()] == [f"run-{at}" for at in range(6, -1, -1)]


def test_listing_all_runs_takes_no_more_for_each_of_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database's own work is counted: it may look at every pair of runs in one statement."""

    def each() -> float:
        with instructions() as done:
            runs = store.every()
        return len(done) / len(runs)

    fill(store, 0, 20)
    few = each()
    fill(store, 20, 80)
    assert each() < 2 * few
