"""Decide: how a site ends by its limits, how a comparison ends, and whose limits are taken."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerparity.anatomy.site import Kind, Site
from layerparity.judge.decide import decide, outcome_of
from layerparity.judge.model_limits import with_limits
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.findings import UnfinishedSweep
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row

GOOD = {"error_ratio": 1.0, "norm_ratio": 1.0}


def ended(*outcomes: Outcome, end: str = "out") -> list[Row]:
    return [Row(Site(f"layers.{n}", end), Kind.REAL, each) for n, each in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("rows", "due"),
    [
        (ended(Outcome.PASS), Outcome.PASS),
        (ended(Outcome.PASS, Outcome.SKIPPED), Outcome.PASS),
        (ended(Outcome.PASS, Outcome.MISSING), Outcome.INCONCLUSIVE),
        (ended(Outcome.PASS, Outcome.INCONCLUSIVE), Outcome.INCONCLUSIVE),
        (ended(Outcome.MISSING, Outcome.FAIL), Outcome.FAIL),
        (ended(Outcome.SKIPPED), Outcome.INCONCLUSIVE),
        (ended(Outcome.PASS, end="in"), Outcome.INCONCLUSIVE),
        ([], Outcome.INCONCLUSIVE),
    ],
)
def test_how_all_sites_together_end(rows: list[Row], due: Outcome) -> None:
    assert outcome_of(rows, (), ()) is due


def test_what_did_not_finish_is_no_pass() -> None:
    doubts = [UnfinishedSweep("sweep", "FAILED")]
    assert outcome_of(ended(Outcome.PASS), (), doubts) is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "size", "z"),
    [("slope", 0.01, 9.0), ("slope_head", 0.01, 9.0), ("offset", 1.0, 20.0)],
)
def test_a_wrong_factor_and_an_offset_fail_on_either_side(
    name: str, size: float, z: float, sign: int
) -> None:
    found = {**GOOD, name: sign * size, f"{name}_z": z}
    outcome, breaches, _ = decide(Kind.REAL, found, CalibratedTolerance())
    assert outcome is Outcome.FAIL
    assert [(each.metric, each.value) for each in breaches] == [(name, sign * size)]
    assert decide(Kind.REAL, {**found, f"{name}_z": 1.0}, CalibratedTolerance())[0] is Outcome.PASS


@pytest.mark.parametrize("norm", [0.9, 1.1])
def test_a_norm_that_is_off_fails_on_either_side(norm: float) -> None:
    outcome, breaches, _ = decide(Kind.REAL, {**GOOD, "norm_ratio": norm}, CalibratedTolerance())
    assert (outcome, [each.metric for each in breaches]) == (Outcome.FAIL, ["norm_ratio"])


@pytest.mark.parametrize("tolerance", [CalibratedTolerance(), FixedTolerance()])
def test_agreement_of_the_logits_has_a_floor_and_divergence_a_ceiling(
    tolerance: CalibratedTolerance | FixedTolerance,
) -> None:
    limits = {"top1_agreement": 0.9, "kl_mean": 0.1}
    for name, limit in limits.items():
        setattr(tolerance, name, limit)
    for agreement, divergence, broken in (
        (0.95, 0.05, []),
        (0.9, 0.1, []),
        (0.5, 0.05, ["top1_agreement"]),
        (0.95, 0.5, ["kl_mean"]),
    ):
        metrics = {"top1_agreement": agreement, "kl_mean": divergence}
        found = tolerance.end_breaches(metrics)
        assert [each.metric for each in found] == broken
        assert all(each.is_under_floor is (each.metric == "top1_agreement") for each in found)
    assert tolerance.end_breaches({}) == [], "sites that are no logits have no such numbers"


def run(folder: Path, dtype: str, error_ratio: float, config: str = "config-0") -> StoredRun:
    """Return a run that keeps limits, as a calibration does."""
    folder.mkdir()
    (folder / "limits.json").write_text(json.dumps({"error_ratio": error_ratio}))
    tags = {"config_digest": config, "dtype": dtype}
    return StoredRun(
        folder.name, folder.name, "FINISHED", tags, datetime.now(UTC), locate=folder.joinpath
    )


def test_the_newest_limits_of_the_candidate_s_model_and_dtype_are_taken(tmp_path: Path) -> None:
    kept = [
        run(tmp_path / "narrow", "bfloat16", 9.0),
        run(tmp_path / "other", "float32", 8.0, config="config-1"),
        run(tmp_path / "own", "float32", 3.0),
        run(tmp_path / "older", "float32", 4.0),
    ]
    store = SimpleNamespace(runs=lambda kind, limit: kept)
    candidate = run(tmp_path / "candidate", "float32", 0.0)
    taken = with_limits(CalibratedTolerance(), store, [candidate])  # type: ignore[arg-type]
    assert taken.error_ratio == 3.0
    strange = run(tmp_path / "strange", "float16", 0.0)
    usual = with_limits(CalibratedTolerance(), store, [strange])  # type: ignore[arg-type]
    assert usual == CalibratedTolerance()
