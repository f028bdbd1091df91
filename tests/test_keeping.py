"""Which runs go, and why every other one stays."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from layerparity.record.stored_run import FAILED, FINISHED, RUNNING, StoredRun
from layerparity.tracking.keeping import age, fates

NOW = datetime.now(tz=UTC)
OLD, EVERY = age("14d"), age("0m")


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


def test_what_began_so_long_ago_goes() -> None:
    runs = [stored("new", 1), stored("old", 20), stored("bad", 20, status=FAILED)]
    assert going(runs, OLD) == {"old", "bad"}
    assert why(runs, OLD, "new") == "it is younger than job.older_than"
    assert going(runs, {"new"}) == {"new"} and why(runs, {"new"}, "old") == "it is not named"
    assert age("90m") < age("2h") < age("1d") < age("1w")


@pytest.mark.parametrize("tag", ["inputs_from", "golden", "candidate", "beside", "judged_again"])
def test_what_a_run_that_stays_refers_to_stays(tag: str) -> None:
    user = stored("user", 1, kind="comparison", tags={tag: "x a y"})
    runs = [user, stored("a", 30), stored("b", 30)]
    assert going(runs, OLD) == {"b"}
    assert why(runs, OLD, "a").startswith("comparison user (user) ")
    # Both go where both may, and what a chain of references leads to stays with its end.
    assert going(runs, EVERY) == {"user", "a", "b"}
    chain = [user, stored("a", 30, tags={"inputs_from": "b"}), stored("b", 30), stored("c", 30)]
    assert going(chain, OLD) == {"c"}
    assert going(chain, EVERY, user="why not") == {"c"}


def test_a_sweep_goes_or_stays_with_its_parts() -> None:
    def of(days: float, **part: Any) -> list[StoredRun]:
        tags = {"holds": "golden", "member.adopted": "x"}
        sweep = stored("sweep", days, kind="sweep", tags=tags)
        return [stored("p1", 30, parent="sweep", **part), stored("p2", 30, parent="sweep"), sweep]

    adopted = stored("adopted", 30)
    assert going([*of(30), adopted], OLD) == {"sweep", "p1", "p2", "adopted"}
    assert going([*of(1), adopted], OLD) == set()
    # A part that ended early is no part of what the sweep stands for.
    assert going(of(1, status=FAILED), OLD) == {"p1"}
    user = stored("user", 1, tags={"inputs_from": "p2"})
    assert going([user, *of(30)], OLD) == set(), "no sweep loses a part"
    assert going([stored("p1", 30, parent="gone")], OLD) == {"p1"}


def test_a_run_that_runs_stays_with_what_it_uses() -> None:
    runs = [stored("now", 30, status=RUNNING, tags={"inputs_from": "fed"}), stored("fed", 30)]
    assert going(runs, OLD) == set()
    assert why(runs, OLD, "now") == "it is running"
    gone = [stored("deleted", 1), stored("used", 1)]
    user = stored("user", 0, tags={"inputs_from": "used"})
    found = fates([user], gone, OLD, {})
    assert [each.run.id for each in found if each.goes] == ["deleted"]
