"""job=gc: what a command lets go, and which run it means by a name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.ground.errors import UserError
from layerparity.jobs import gc
from layerparity.making import steps
from layerparity.record.stored_run import FINISHED, StoredRun
from layerparity.settings.config import Config
from layerparity.tracking.keeping import RunFate


def run(run_id: str, name: str) -> StoredRun:
    return StoredRun(f"{run_id}{'0' * 32}"[:32], name, FINISHED, {}, datetime.now(tz=UTC))


# The newest first.
RUNS = [run("abcd1", "new"), run("abcd2", "old"), run("ffff", "old"), run("1234", "abcd")]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("abcd1", "abcd1"),
        ("ffff", "ffff"),
        # Of one name the newest is meant.
        ("old", "abcd2"),
        ("new", "abcd1"),
        # Of two runs whose ids begin so neither is; what is so called is.
        ("abcd", "1234"),
        # Three letters are no beginning of an id.
        ("fff", None),
        ("", None),
        ("absent", None),
    ],
)
def test_a_run_is_named_by_its_id_or_its_name(words: str, found: str | None) -> None:
    named = gc._named(RUNS, words)
    assert (named and named.id.rstrip("0")) == found


def test_an_id_that_two_runs_begin_with_names_neither() -> None:
    assert gc._named(RUNS[:3], "abcd") is None


def asked(**keys: Any) -> Config:
    job = {each: keys.pop(each) for each in list(keys) if each not in ("run", "tracking")}
    return Config(job=gc.Settings(**job), **keys)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "own_settings", lambda config: {})


def test_a_run_goes_by_its_age_or_its_name() -> None:
    assert gc._oldest(asked(older_than="14d")) == timedelta(days=14)
    assert gc._oldest(asked(run="r")) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "job=gc wants to know what may go"),
        # To remove says nothing of what: everything would go.
        ({"apply": True}, "job=gc wants to know what may go"),
        ({"run": "r", "older_than": "1d"}, "run= names what goes, and job.older_than="),
        ({"older_than": "two weeks"}, "is no age"),
    ],
)
def test_what_names_nothing_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        gc._oldest(asked(**keys))


def test_a_named_run_that_stays_is_said_with_what_is_to_be_done() -> None:
    config = asked(run="abcd1")
    gc._refuse_in_vain(RunFate(RUNS[0]), config)
    for fate, said in (
        (RunFate(RUNS[0], why="judges by it", by="e" * 32), "job=gc run=eeeeeeee"),
        (RunFate(RUNS[0], misfit="it is a part of s"), "name that one: it goes as a whole"),
        (RunFate(RUNS[0], why="it is running"), "wait until it has ended"),
    ):
        with pytest.raises(UserError, match=said):
            gc._refuse_in_vain(fate, config)


def test_what_an_experiment_names_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments" / "deep").mkdir(parents=True)
    written = "golden: new\njob:\n  steps: [{a: x}]\n  beside: ffff\nname: 'old'\n"
    (tmp_path / "experiments" / "deep" / "mine.yaml").write_text(written)
    monkeypatch.chdir(tmp_path)

    def find(name: str, kind: str) -> list[StoredRun]:
        if kind == "golden":
            return [RUNS[1]]
        raise UserError("none")

    store: Any = SimpleNamespace(find=find)
    spared = dict(gc._spared(store, RUNS))
    assert {each.rstrip("0"): why for each, why in spared.items()} == {
        "abcd2": "golden=latest means it",
        "abcd1": "experiments/deep/mine.yaml names it",
        "ffff": "experiments/deep/mine.yaml names it",
    }
