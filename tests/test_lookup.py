"""A run by a user's words: the one that is meant, and never another where several could be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from layerparity.ground.errors import UserError
from layerparity.record.stored_run import FAILED, FINISHED, StoredRun
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.lookup import look_up
from layerparity.tracking.stored_runs import StoredRuns

NOW = datetime(2030, 1, 1, tzinfo=UTC)
_CLAUSE = re.compile(r"(.+?) (=|LIKE|IN) (.+)")


def run(name: str, run_id: str = "", **changes: Any) -> StoredRun:
    """Return a finished golden; its id begins as is said, or is made of its name's letters."""
    tags = {"kind": changes.pop("kind", "golden"), **changes.pop("tags", {})}
    whole = f"{run_id or name.encode().hex()}{'0' * 32}"[:32]
    return replace(StoredRun(whole, name, FINISHED, tags, NOW), **changes)


class Runs(StoredRuns):
    """Runs in memory, the newest first, searched by the clauses that MLflow gets."""

    def __init__(self, *runs: StoredRun) -> None:
        self.known = [replace(each, sequence=len(runs) - n) for n, each in enumerate(runs)]
        self.read = 0

    @property
    def config(self) -> TrackingConfig:
        return TrackingConfig(folder="nowhere")

    def search(self, clauses: Sequence[str], limit: int) -> list[StoredRun]:
        found = [each for each in self.known if all(_fits(each, words) for words in clauses)]
        self.read += len(found[:limit])
        return found[:limit]


def _fits(each: StoredRun, clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    assert match is not None, clause
    field, sign, text = match.groups()
    told = {"run_id": each.id, "status": each.status, "run_name": each.name}
    parent = {"`mlflow.parentRunId`": each.parent}
    name = field.partition(".")[2]
    own = {f"`layerparity.{tag}`": value for tag, value in each.tags.items()}
    value = {**told, **parent, **own}.get(name) or ""
    if sign == "IN":
        return repr(value) in text
    return value.startswith(text.strip("'%")) if sign == "LIKE" else value == text.strip("'")


def names(stored: Runs, words: str, kind: str | None = "golden") -> list[str]:
    return [each.name for each in look_up(stored, words, kind)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_beginning_of_an_id_must_be_that_of_one_run() -> None:
    stored = Runs(run("new", "abcd1"), run("old", "abcd2"), run("other", "ffff"))
    assert names(stored, "abcd1") == ["new"] and names(stored, "ffff") == ["other"]
    with pytest.raises(UserError, match=r"'abcd' begins the ids .*\(new\) and .*\(old\)"):
        look_up(stored, "abcd", "golden")


def test_of_one_name_the_newest_of_the_kind_is_meant() -> None:
    stored = Runs(run("a", "aa01", kind="candidate"), run("a", "aa02"), run("a", "aa03"))
    assert [each.id[:4] for each in look_up(stored, "a", "golden")] == ["aa02"]
    assert [each.id[:4] for each in look_up(stored, "a", "comparison")] == ["aa01"]
    # A name is more than letters that look like an id.
    assert names(Runs(run("beef"), run("x", "be")), "beef") == ["beef"]


def test_the_latest_is_the_newest_that_finished() -> None:
    stored = Runs(run("cut", status=FAILED), run("c", kind="candidate"), run("g"), run("old"))
    assert names(stored, "latest") == ["g"]
    assert names(stored, "latest", "candidate") == ["c"]
    with pytest.raises(UserError, match="no finished comparison run"):
        look_up(stored, "latest", "comparison")


def test_where_the_newest_is_the_one_no_others_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    by_hf = [run(f"g{at}", tags={"port": "hf"}) for at in range(20)]
    stored = Runs(*by_hf)
    assert names(stored, "latest") == ["g0"]
    # One more than is asked for may be a job's own.
    assert stored.read == 2
    other = run("other", tags={"port": "vllm"})
    off = run("off", tags={"port": "hf", "off_reference": "layer_0/mlp:out 9"})
    assert names(Runs(run("cut", status=FAILED), other, off, *by_hf), "latest") == ["g0"]
    assert capsys.readouterr().out.count("passed over") == 3


def test_a_sweep_is_its_finished_parts() -> None:
    parts = [run("p 2", parent="s" * 32), run("p 10", parent="s" * 32)]
    cut = run("p 3", parent="s" * 32, status=FAILED)
    sweep = run("sweep", "s" * 32, kind="sweep", tags={"holds": "golden"})
    stored = Runs(*parts, cut, sweep)
    assert names(stored, "sweep") == names(stored, "latest") == ["p 2", "p 10"]
    assert names(stored, "p 10") == ["p 10"]
    with pytest.raises(UserError, match="None of the 1 runs of the sweep 'sweep' finished"):
        look_up(Runs(cut, sweep), "sweep", "golden")


def test_what_is_not_there_is_said_with_what_is_near() -> None:
    with pytest.raises(UserError, match=r"There is no run 'goldne' .*Did you mean 'golden'"):
        look_up(Runs(run("golden")), "goldne", "golden")
    with pytest.raises(UserError, match=r"There are no runs in .*make a golden first"):
        look_up(Runs(), "golden", "golden")
    with pytest.raises(UserError, match="There is no folder a/b"):
        look_up(Runs(run("golden")), "a/b", "golden")
