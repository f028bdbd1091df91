"""job=judge: stored rows under other limits, without a tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Ended
from report_samples import sample

from layerparity.ground.errors import Exit
from layerparity.judge.judge import changes, rejudge
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.verdict import Outcome, open_to_doubt

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")


def test_the_same_limits_change_nothing() -> None:
    for comparison in (sample(), sample(broken="layers.2.mlp:out")):
        again = rejudge(comparison, FixedTolerance())
        assert changes(comparison, again) == []
        assert again.verdict.outcome is comparison.verdict.outcome


def test_tighter_limits_fail_what_passed_and_looser_pass_what_failed() -> None:
    clean = sample()
    tight = rejudge(clean, FixedTolerance(max_abs_diff=1e-12))
    assert tight.verdict.outcome is Outcome.FAIL
    assert all(each.after.outcome is Outcome.FAIL for each in changes(clean, tight))
    assert tight.limits["max_abs_diff"] == 1e-12
    broken = sample(broken="layers.2.mlp:out")
    easy = FixedTolerance("fixed", 1e9, 1e9, -1.0, -2.0, -2.0)
    assert rejudge(broken, easy).verdict.outcome is not Outcome.FAIL
    assert rejudge(rejudge(broken, easy), FixedTolerance()).verdict.outcome is Outcome.FAIL


def test_what_no_row_says_stays_in_doubt() -> None:
    clean = sample()
    doubted = replace(clean, verdict=open_to_doubt(clean.verdict))
    assert rejudge(doubted, FixedTolerance()).verdict.exit is Exit.INCONCLUSIVE
    failing = sample(broken="layers.2.mlp:out")
    failing.warnings.append("The sweep x ended as FAILED: what did not finish was not compared.")
    easy = FixedTolerance("fixed", 1e9, 1e9, -1.0, -2.0, -2.0)
    assert rejudge(failing, easy).verdict.outcome is not Outcome.PASS


def test_the_number_of_blocks_is_remembered() -> None:
    part = sample(layers=3)
    said = "whole model: fail, 3 of 62 blocks compared"
    part.verdict = replace(part.verdict, whole_model=said)
    assert "3 of 62 blocks" in rejudge(part, FixedTolerance()).verdict.whole_model


@pytest.fixture
def compared(cli: Cli, tmp_path: Path) -> tuple[Cli, Path]:
    """The command line over a store with one comparison, called judged."""
    folder = f"tracking.folder={tmp_path / 'store'}"
    block = ("scope=single", "layer=1")
    for words in (
        (*CPU, "scope=range", "start=1", "end=1", "inputs=random"),
        (*CPU, "kind=candidate", *block, "inputs=golden"),
        ("job=compare", "name=judged", "tolerance=fixed"),
    ):
        ended = cli(folder, *words)
        assert ended.exit == 0, ended.out + ended.err
    return (lambda *words: cli(folder, *words)), tmp_path / "store"


def test_a_stored_comparison_is_judged_without_its_tensors(compared: tuple[Cli, Path]) -> None:
    run, store = compared
    for path in store.rglob("*.safetensors"):
        path.unlink()
    again = run(
        "job=judge", "run=judged", "tolerance=fixed", "tolerance.similarity_percentage=100.1"
    )
    assert again.exit == 1, again.out + again.err
    assert "pass becomes fail" in again.out
    newest = max(store.rglob("comparison.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(newest.read_text())["limits"]["similarity_percentage"] == 100.1
    back = run("job=judge", "tolerance=fixed")
    assert back.exit == 0
    assert "fail becomes pass" in back.out
    assert "of " in back.out
    same = run("job=judge", "run=judged", "tolerance=fixed")
    assert same.exit == 0
    assert "still pass" in same.out


def test_what_is_no_comparison_is_refused(compared: tuple[Cli, Path]) -> None:
    run, _ = compared
    golden = run("job=judge", "run=golden-gpu-range-1-1")
    assert golden.exit == 2
    assert "holds no comparison.json" in golden.err
    nobody = run("job=judge", "run=nobody")
    assert nobody.exit == 2
