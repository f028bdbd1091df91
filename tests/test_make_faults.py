"""The short form of `make test-faults`: what no other test kills, fills, damages or misleads so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from faults import planned
from faults_child import Ended
from faults_held import CRASH, LEFT, LOST, WHOLE, Held, changes
from faults_kills import _chosen
from faults_moments import Moment
from faults_scene import Place, of_command

# Writers, disks, servers, databases, files and signals have tests of their own.
TRIALS = "kill golden:3,kill sweep:4,kill compare:0,kill resume:0,kill resume:4,bit of a run:0"


def test_nothing_is_lost_or_falsely_whole(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "faults.py"), "--only", TRIALS]
    ended = subprocess.run(
        [*words, "--folder", str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []


GOOD = Held("1", "a", "golden", "x", "golden k", "FINISHED", "FINISHED", "content", "")
NEW = replace(GOOD, id="2")


@pytest.mark.parametrize(
    ("after", "column"),
    [
        ([], LOST),
        ([replace(GOOD, content="other")], LOST),
        ([replace(GOOD, status="INTERRUPTED", raw="KILLED")], LOST),
        ([GOOD, replace(NEW, content="", problem="it is damaged")], WHOLE),
        ([GOOD, replace(NEW, content="other")], WHOLE),
        ([GOOD, replace(NEW, status="INTERRUPTED", raw="RUNNING")], LEFT),
        ([GOOD, replace(NEW, status="KILLED", raw="KILLED")], None),
        ([GOOD, NEW], None),
    ],
)
def test_what_became_of_a_store_is_told(after: list[Held], column: str | None) -> None:
    found = [each for each, _ in changes([GOOD], after, {"golden k": "content"})]
    assert found == ([column] if column else [])


@pytest.mark.parametrize(
    ("status", "err", "column"),
    [
        (0, "", None),
        (1, "", LOST),
        (3, "", CRASH),
        (1, "Traceback (most recent call last):\n", CRASH),
        (None, "", LEFT),
    ],
)
def test_how_a_command_ended_is_told(status: int | None, err: str, column: str | None) -> None:
    ended = Ended(status, "", err, 1.0)
    assert [each for each, _ in of_command(ended, "it", (0,), LOST)] == ([column] if column else [])


def test_what_is_left_behind_is_told(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "cache")
    left = ["runs/.first-start-x", "runs/artifacts/.0.json.abcd1234.part", "tmp/layerparity-x"]
    kept = ["runs/mlflow.db", "runs/spool/.lock", "runs/artifacts/0.json"]
    for name in (*left, *kept, "runs/spool/0123"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(what for _, what in place.leftovers()) == sorted([*left, "runs/spool/0123"])


def test_few_trials_have_every_subject_and_each_point_has_its_turn() -> None:
    known = {"kill golden": 100, "disk": 20, "signals": 50}
    assert {name: len(each) for name, each in planned(known, 4, "").items()} == {
        "kill golden": 4,
        "disk": 1,
        "signals": 2,
    }
    assert planned(known, 100, "disk:7,kill:3,kill:4") == {"disk": [7], "kill golden": [3, 4]}
    moments = [Moment(p, n, a) for n in (1, 2) for p in "abc" for a in (False, True)]
    chosen = [_chosen(moments, None, number) for number in (3, 4, 8, 9, 13, 14)]  # type: ignore[arg-type]
    assert {each.point for each in chosen[:3]} == set("abc")
    assert [each.nth for each in chosen] == [1, 1, 1, 2, 2, 2]
    assert len(set(chosen)) == 6
