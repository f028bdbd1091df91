"""job=gate: the verdict for CI, its files, and the first bad comparison of a series."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Ended

from layerparity.ground.numeral import numeral
from layerparity.record.stored_run import FINISHED, StoredRun
from layerparity.report import series
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

CANDIDATE = ("backend=gpu", "device_map=cpu", "kind=candidate", "scope=single", "layer=1")
RIGHT = ("attn_implementation=eager", "name=right")
WRONG = ("port=fault", "port.name=qk_norm_per_head", "name=wrong")


def comparison(number: int, verdict: str, **tags: str) -> StoredRun:
    began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
    told = {"verdict": verdict, "revision": f"{number:040x}", **tags}
    return StoredRun(f"{number:032x}"[::-1], "c", FINISHED, told, began, number)


def test_the_first_bad_one_is_the_oldest_that_none_passes_after() -> None:
    outcomes = ["pass", "fail", "pass", "inconclusive", "fail"]
    members = [comparison(number, each) for number, each in enumerate(outcomes)]
    turn = series.first_bad(members)
    assert turn is not None and turn.good is not None
    assert (turn.bad, turn.good) == (members[3], members[2])
    assert series.first_bad(members[:3]) is None
    alone = series.first_bad(members[1:2])
    assert alone is not None and alone.good is None
    assert series.first_bad([]) is None and series.sentences([]) == []


def test_what_changed_with_the_first_bad_one_is_said() -> None:
    good = comparison(1, "pass", golden="a" * 32, **{"version.torch": "2.9.0", "version.x": "1"})
    bad = comparison(2, "fail", golden="a" * 32, **{"version.torch": "2.9.1", "version.x": "1"})
    told = series.sentences([good, bad])
    assert told == [
        "first bad: 000000000000 (20000000), after 000000000000 (10000000) passed",
        "  revision: 000000000000 -> 000000000000",
        "  torch: 2.9.0 -> 2.9.1",
    ]
    same = [comparison(1, "pass", revision="v1"), comparison(2, "fail", revision="v1")]
    assert "nothing changed between the two" in series.sentences(same)[1]
    assert "no comparison of this series passed before it" in series.sentences(same[1:])[0]
    assert series.rows_of([good, bad])[1]["changed"] == "torch 2.9.1"
    piped = series.markdown([comparison(1, "fail", first_failure="a|b")], "s")
    assert "a\\|b" in piped


def test_how_long_a_series_passes_is_said() -> None:
    members = [comparison(n, "pass" if n else "fail") for n in range(3)]
    assert series.sentences(members) == ["series: the last 2 of 3 pass, after 00000000 did not."]
    assert series.sentences(members[1:2]) == ["series: the newest one passes."]


def test_a_commit_that_breaks_parity_is_named(
    run: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gate = ("job=gate", "golden=the-golden", f"to={tmp_path / 'gate'}")
    assert run(*CANDIDATE, *RIGHT, "golden=the-golden").exit == 0
    monkeypatch.setenv("GITHUB_SHA", "1" * 40)
    passed = run(*gate, "candidate=right")
    assert passed.exit == 0, passed.err
    assert "series: the newest one passes." in passed.out
    assert run(*CANDIDATE, *WRONG, "golden=the-golden").exit == 0
    # Another series' comparison is none of this one's.
    assert run(*gate, "candidate=wrong", "job.series=another").exit == 1
    monkeypatch.setenv("GITHUB_SHA", "2" * 40)
    failed = run(*gate, "candidate=wrong")
    assert failed.exit == 1
    assert "first bad: 222222222222 (" in failed.out
    assert "revision: 111111111111 -> 222222222222" in failed.out
    rows = json.loads((tmp_path / "gate" / "series.json").read_text(encoding="utf-8"))
    assert [(each["revision"], each["verdict"]) for each in rows] == [
        ("1" * 40, "pass"),
        ("2" * 40, "fail"),
    ]
    assert rows[1]["version.torch"] and rows[1]["worst"].startswith("R ")
    assert rows[1]["worst_value"] > rows[1]["worst_limit"] > rows[0]["worst_value"] > 0
    # One number, written in one way: as the page writes it.
    assert rows[1]["worst"] == f"R {numeral(rows[1]['worst_value'])} of 2"
    verdict = json.loads((tmp_path / "gate" / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["outcome"] == "fail"
    suite = ElementTree.parse(tmp_path / "gate" / "junit.xml").getroot()
    assert int(suite.get("failures", "0")) > 0
    assert (tmp_path / "gate" / "report.html").stat().st_size > 1000
    assert "first bad: 222222222222" in summary.read_text(encoding="utf-8")
    machine = run(*gate, "candidate=wrong", "--json")
    assert machine.exit == 1 and json.loads(machine.out)["outcome"] == "fail"


def test_what_a_gate_cannot_do_is_one_line(run: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    taken = run("job=gate", "golden=the-golden", f"to={tmp_path / 'file'}")
    assert taken.exit == 2 and "cannot be written" in taken.err
    weights = run("job=gate", "what=weights")
    assert weights.exit == 2 and "use job=compare what=weights" in weights.err


def test_a_candidate_that_failed_is_no_pass_of_the_one_before(
    run: Callable[..., Ended], store: Path
) -> None:
    """What is newer did not finish: nothing of its revision was judged."""
    assert run(*CANDIDATE, *RIGHT, "golden=the-golden").exit == 0
    kept = open_store(TrackingConfig(folder=str(store)))
    with pytest.raises(RuntimeError), kept.start("broken", "candidate", {"dtype": "float32"}, {}):
        raise RuntimeError
    judged = run("job=gate")
    assert judged.exit == 2 and "'broken' (" in judged.err and "is FAILED" in judged.err
    assert run("job=gate", "candidate=right").exit == 0
    # One of another type is not what was asked for.
    assert "'broken'" not in run("job=gate", "dtype=bfloat16").err
    latest = run("job=compare", "golden=the-golden", "candidate=latest")
    assert "broken" in latest.out and "is newer, and passed over: FAILED" in latest.out
