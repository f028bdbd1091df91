"""Which runs rules let go, and why every other one stays."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from layerparity.record.stored_run import FAILED, FINISHED, RUNNING, StoredRun
from layerparity.tracking.keeping import RemovalRules, age, fates

NOW = datetime.now(tz=UTC)


def stored(name: str, days: float = 0, **changes: Any) -> StoredRun:
    """Return a finished run that no store holds; its id is its name."""
    tags = {"kind": changes.pop("kind", "golden"), **changes.pop("tags", {})}
    status = changes.pop("status", FINISHED)
    run = StoredRun(name, changes.pop("called", name), status, tags, NOW - timedelta(days=days))
    return replace(run, **changes)


def going(runs: list[StoredRun], rules: Any, **spared: str) -> set[str]:
    return {each.run.id for each in fates(runs, [], rules, spared) if each.goes}


def why(runs: list[StoredRun], rules: Any, name: str, **spared: str) -> str:
    (fate,) = [each for each in fates(runs, [], rules, spared) if each.run.id == name]
    return fate.why or fate.misfit


def test_rules_must_all_fit() -> None:
    runs = [
        stored("new", 1),
        stored("old", 20),
        stored("bad", 20, status=FAILED),
        stored("cut", 20, status="INTERRUPTED"),
        stored("other", 20, kind="candidate", tags={"model": "m", "verdict": "fail"}),
    ]
    assert going(runs, RemovalRules({}, older_than="14d")) == {"old", "bad", "cut", "other"}
    assert going(runs, RemovalRules({}, status=FAILED, older_than="14d")) == {"bad"}
    assert going(runs, RemovalRules({}, status="KILLED")) == {"cut"}
    assert going(runs, RemovalRules({"kind": "candidate", "model": "m"})) == {"other"}
    assert going(runs, RemovalRules({"verdict": "pass"})) == set()
    assert going(runs, RemovalRules({}, found={"new"})) == {"new"}
    assert why(runs, RemovalRules({}, older_than="14d"), "new") == "it is younger than 14d"
    assert why(runs, RemovalRules({"kind": "golden"}), "other") == "its kind is candidate"
    assert age("90m") < age("2h") < age("1d") < age("1w")


def test_the_newest_of_each_name_are_kept() -> None:
    runs = [
        stored("a4", 1, called="a", status=FAILED),
        stored("a3", 2, called="a"),
        stored("a2", 3, called="a", status=FAILED),
        stored("a1", 4, called="a"),
        stored("a0", 5, called="a"),
        stored("b0", 6, called="b"),
        stored("c0", 7, called="a", kind="candidate"),
    ]
    # What failed counts for nothing, and goes once so many finished ones are newer.
    assert going(runs, RemovalRules({}, keep_last=1)) == {"a2", "a1", "a0"}
    assert going(runs, RemovalRules({}, keep_last=2)) == {"a0"}
    assert going(runs, RemovalRules({}, keep_last=0)) == {each.id for each in runs}
    assert why(runs, RemovalRules({}, keep_last=2), "b0") == "it is one of the newest 2 of its name"


def test_runs_of_one_name_are_not_counted_anew_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    finished = property(lambda run: looked.append(run.id) or run.status == FINISHED)
    monkeypatch.setattr(StoredRun, "finished", finished)

    def each(count: int) -> float:
        looked.clear()
        fates(
            [stored(f"a{at}", called="a") for at in range(count)],
            [],
            RemovalRules({}, keep_last=3),
            {},
        )
        return len(looked) / count

    assert each(40) == each(10)


@pytest.mark.parametrize("tag", ["inputs_from", "golden", "candidate", "beside", "judged_again"])
def test_what_a_run_that_stays_refers_to_stays(tag: str) -> None:
    user = stored("user", 1, kind="comparison", tags={tag: "x a y"})
    runs = [user, stored("a", 30), stored("b", 30)]
    old = RemovalRules({}, older_than="14d")
    assert going(runs, old) == {"b"}
    assert why(runs, old, "a").startswith("comparison user (user) ")
    # Both go where both may, and what a chain of references leads to stays with its end.
    assert going(runs, RemovalRules({}, keep_last=0)) == {"user", "a", "b"}
    chain = [user, stored("a", 30, tags={"inputs_from": "b"}), stored("b", 30), stored("c", 30)]
    assert going(chain, old) == {"c"}
    assert going(chain, RemovalRules({}, keep_last=0), user="why not") == {"c"}


def test_a_sweep_goes_or_stays_with_its_parts() -> None:
    def of(days: float, **part: Any) -> list[StoredRun]:
        tags = {"holds": "golden", "member.adopted": "x"}
        sweep = stored("sweep", days, kind="sweep", tags=tags)
        return [stored("p1", 30, parent="sweep", **part), stored("p2", 30, parent="sweep"), sweep]

    old, adopted = RemovalRules({}, older_than="14d"), stored("adopted", 30)
    assert going([*of(30), adopted], old) == {"sweep", "p1", "p2", "adopted"}
    assert going([*of(1), adopted], old) == set()
    assert going(of(30), RemovalRules({"kind": "golden"})) == {"sweep", "p1", "p2"}
    # A part that ended early is no part of what the sweep stands for.
    assert going(of(1, status=FAILED), RemovalRules({}, status=FAILED)) == {"p1"}
    user = stored("user", 1, tags={"inputs_from": "p2"})
    assert going([user, *of(30)], old) == set(), "no sweep loses a part"
    assert going([stored("p1", 30, parent="gone")], old) == {"p1"}


def test_a_run_that_runs_stays_with_what_it_uses() -> None:
    runs = [stored("now", 30, status=RUNNING, tags={"inputs_from": "fed"}), stored("fed", 30)]
    assert going(runs, RemovalRules({}, older_than="1d")) == set()
    assert why(runs, RemovalRules({}, older_than="1d"), "now") == "it is running"
    gone = [stored("deleted", 1), stored("used", 1)]
    user = stored("user", 0, tags={"inputs_from": "used"})
    found = fates([user], gone, RemovalRules({}, older_than="1d"), {})
    assert [each.run.id for each in found if each.goes] == ["deleted"]
