"""job=judge: stored rows under other limits, without a tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended
from report_samples import sample
from runs import StoredRun, make_run, sites

from layerparity.ground.errors import Exit
from layerparity.judge.again import changed_rows, judge_again
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.base import Tolerance
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.findings import UnfinishedSweep
from layerparity.record.verdict import Outcome, WholeModel
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import whole_model
from layerparity.report.reasons import reason

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")


def test_the_same_limits_change_nothing() -> None:
    for comparison in (sample(), sample(broken="layers.2.mlp:out")):
        again = judge_again(comparison, FixedTolerance())
        assert changed_rows(comparison, again) == []
        assert again.outcome is comparison.outcome


def test_tighter_limits_fail_what_passed_and_looser_pass_what_failed() -> None:
    clean = sample()
    tight = judge_again(clean, FixedTolerance(max_abs_diff=1e-12))
    assert tight.outcome is Outcome.FAIL
    assert {after.outcome for _, after in changed_rows(clean, tight)} == {Outcome.FAIL}
    assert tight.limits["max_abs_diff"] == 1e-12
    broken = sample(broken="layers.2.mlp:out")
    easy = FixedTolerance("fixed", 1e9, 1e9, -1.0, -2.0, -2.0)
    assert judge_again(broken, easy).outcome is not Outcome.FAIL
    assert judge_again(judge_again(broken, easy), FixedTolerance()).outcome is Outcome.FAIL


def test_what_no_row_says_stays_in_doubt() -> None:
    unfinished = (UnfinishedSweep("x", "FAILED"),)
    doubted = replace(sample(), unfinished=unfinished)
    assert judge_again(doubted, FixedTolerance()).exit is Exit.INCONCLUSIVE
    failing = replace(sample(broken="layers.2.mlp:out"), unfinished=unfinished)
    easy = FixedTolerance("fixed", 1e9, 1e9, -1.0, -2.0, -2.0)
    assert judge_again(failing, easy).outcome is Outcome.INCONCLUSIVE


def test_the_number_of_blocks_is_remembered() -> None:
    part = replace(sample(layers=3), whole=WholeModel(Outcome.FAIL, blocks=62, compared=3))
    again = judge_again(part, FixedTolerance())
    assert (again.whole.compared, again.whole.blocks) == (3, 62)
    assert "3 of 62 blocks" in whole_model(again)


class Third(FixedTolerance):
    """A tolerance of somebody else's, which knows what the fixed one does not."""

    knows_rounding = True
    knows_chains = True

    def __init__(self) -> None:
        super().__init__("third")


TOLERANCES: dict[str, Tolerance] = {
    "fixed": FixedTolerance(),
    "calibrated": CalibratedTolerance(),
    "third": Third(),
}


def unsure(tmp_path: Path) -> tuple[StoredRun, StoredRun]:
    """Return two runs in bfloat16, the candidate's inputs synthetic, the golden without floors."""
    blocks: Any = {"dtype": "bfloat16", "scope": {"kind": "range", "start": 0, "end": 1}}
    golden = make_run(tmp_path / "g", sites(), **blocks)
    return golden, make_run(tmp_path / "c", sites(), **blocks, synthetic=True)


@pytest.mark.parametrize("now", TOLERANCES)
@pytest.mark.parametrize("before", TOLERANCES)
def test_judged_again_is_as_if_compared_so(tmp_path: Path, before: str, now: str) -> None:
    golden, candidate = unsure(tmp_path)
    first, due = (conclude([golden], [candidate], TOLERANCES[name]) for name in (before, now))
    again = judge_again(first, TOLERANCES[now])
    assert warning_lines(again) == warning_lines(due)
    assert again.rows == due.rows
    assert (again.outcome, again.knows_chains) == (due.outcome, due.knows_chains)


def test_what_a_tolerance_does_not_know_is_said_of_it_alone(tmp_path: Path) -> None:
    runs = unsure(tmp_path)
    found = {name: conclude(runs[:1], runs[1:], each) for name, each in TOLERANCES.items()}
    synthetic = "The candidate's inputs are synthetic: real ones may show other errors."
    assert warning_lines(found["calibrated"]) == warning_lines(found["third"]) == [synthetic]
    assert warning_lines(found["fixed"])[1].startswith("The fixed tolerance does not know how far")
    assert [each.knows_chains for each in found.values()] == [False, True, True]
    # Nothing says why there is no floor but the comparison itself.
    reasons = {reason(row) for row in found["calibrated"].rows if row.site.local == "mlp:out"}
    assert reasons == {
        "the golden has no reference to judge by: make it on backend=gpu with port=hf"
    }


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
    newest = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime)
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
    golden = run("job=judge", "run=golden-tiny_minimax_m2-range-1-1-float32-cpu")
    assert golden.exit == 2
    assert "holds no verdict.json" in golden.err
    nobody = run("job=judge", "run=nobody")
    assert nobody.exit == 2


def changed(text: str, **values: object) -> str:
    return json.dumps({**json.loads(text), **values})


UNREADABLE: dict[str, tuple[Callable[[str], str], str, str]] = {
    "newer": (
        lambda text: changed(text, version=99),
        "was written by a newer layerparity (version 99;",
        "update layerparity.",
    ),
    # What a later version adds is no matter: the version is looked at first.
    "newer, and other": (
        lambda text: json.dumps({"version": 99, "more": 1}),
        "was written by a newer layerparity (version 99;",
        "update layerparity.",
    ),
    "half": (lambda text: text[:99], "is damaged (", "compare the runs again."),
    "no rows": (
        lambda text: changed(text, rows=None),
        "is damaged (",
        "compare the runs again.",
    ),
}


def test_a_verdict_that_cannot_be_read_is_one_line(compared: tuple[Cli, Path]) -> None:
    run, store = compared
    (path,) = store.rglob("verdict.json")
    good = path.read_text()
    for change, says, cure in UNREADABLE.values():
        path.write_text(change(good))
        said = refusal(run("job=judge", "run=judged"))
        assert said.startswith(f"{path} {says}")
        assert said.endswith(cure)
    # The version before kept a file of another name.
    path.rename(path.with_name("comparison.json"))
    said = refusal(run("job=judge", "run=judged"))
    assert said.startswith("Run 'judged' holds no verdict.json: ")
    assert said.endswith("or compare again.")


def test_a_stored_verdict_with_another_number_is_not_judged(compared: tuple[Cli, Path]) -> None:
    run, store = compared
    (path,) = store.rglob("verdict.json")
    raw = json.loads(path.read_text())
    metrics = next(row["metrics"] for row in raw["rows"] if "max_abs_diff" in row["metrics"])
    metrics["max_abs_diff"] += 1.0
    path.write_text(json.dumps(raw, indent=1))
    said = refusal(run("job=judge", "run=judged"))
    assert said == (
        f"{path} is damaged (it is not the one that the run wrote): compare the runs again."
    )


def refusal(ended: Ended) -> str:
    """Return the one line in which a command is refused."""
    assert (ended.exit, "Traceback" in ended.err) == (2, False), ended.err
    (said,) = [line for line in ended.err.splitlines() if line.startswith("layerparity: ")]
    return said.removeprefix("layerparity: ")
