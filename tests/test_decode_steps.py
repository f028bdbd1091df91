"""Decode steps that are measured together, against each measured by itself, on real runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended

from layerparity.anatomy.site import PREFILL
from layerparity.ground.errors import Exit
from layerparity.judge import decode_steps, evaluate
from layerparity.judge.align import Alignment
from layerparity.judge.calibrate import Calibration
from layerparity.judge.conclude import paired
from layerparity.judge.evaluate import Measured, measure
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Run = Callable[..., Ended]
Sides = tuple[RunSet, RunSet, Alignment, Calibration]
HERE = ("backend=gpu", "device_map=cpu", "threads=1")
WITH = (*HERE, "capture=components", "generate.max_new_tokens=4")
# What is compared is in bfloat16, and no component alone.
FLOORS = ("reference.dtypes=[bfloat16]", "reference.components=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def sides(cli: Run, folder: Path, three_blocks: Path, request: pytest.FixtureRequest) -> Sides:
    """Return a golden, and a candidate that was fed as the test asks, in bfloat16; made once."""
    feed, store = request.param, f"tracking.folder={folder}"
    both = (*WITH, "model=checkpoint", f"model.path={three_blocks}", "dtype=bfloat16", store)
    if not folder.joinpath("artifacts").exists():
        assert cli(*both, *FLOORS).exit == Exit.OK
    if not (folder / feed).exists():
        other = ("kind=candidate", "attn_implementation=eager", "experts_implementation=eager")
        assert cli(*both, *other, f"feed={feed}", f"name={feed}").exit == Exit.OK
        (folder / feed).touch()
    runs = open_store(TrackingConfig(folder=str(folder)))
    golden, candidate, aligned = paired(runs.find("latest", "golden"), runs.find(feed))
    return golden, candidate, aligned, Calibration(golden, candidate, aligned.blocks)


def together(sides: Sides) -> dict[str, Measured]:
    """Return what was measured in groups, by site."""
    golden, candidate, aligned, calibration = sides
    found: dict[str, Measured] = {}
    for group in decode_steps.by_steps(aligned.pairs, calibration):
        of_group = decode_steps.measure_steps(group, golden, candidate, calibration, aligned.blocks)
        found |= {str(site): each for site, each in of_group.items()}
    return found


def one_by_one(sides: Sides) -> dict[str, Measured]:
    """Return what was measured of each pair by itself, by site."""
    golden, candidate, aligned, calibration = sides
    return {
        str(pair.site): measure(pair, golden, candidate, calibration, aligned.blocks)
        for pair in aligned.pairs
    }


def same(left: Measured, right: Measured) -> None:
    """Assert that two ways measured the same."""
    assert left.metrics == pytest.approx(right.metrics, rel=1e-9, abs=1e-12, nan_ok=True)
    assert list(left.metrics) == list(right.metrics)
    assert left.token_errors == pytest.approx(right.token_errors, rel=1e-5)
    assert (left.nothing, left.lacking) == (right.nothing, right.lacking)
    assert left.profiles.keys() == right.profiles.keys()
    for name, profile in left.profiles.items():
        assert profile == pytest.approx(right.profiles[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("sides", ["isolated", "chained"], indirect=True)
def test_steps_are_measured_together_as_each_by_itself(sides: Sides) -> None:
    groups = list(decode_steps.by_steps(sides[2].pairs, sides[3]))
    assert sum(len(group) for group in groups) == len(sides[2].pairs)
    # Each block shows a dozen sites and more at every decode step.
    assert sum(len(group) == 3 for group in groups) > 30
    assert all(len(each) == 1 for each in groups if each[0].site.phase == PREFILL)
    found, expected = together(sides), one_by_one(sides)
    assert found.keys() == expected.keys()
    for site, measured in found.items():
        same(measured, expected[site])
    assert any("error_ratio_head" in each.metrics for each in found.values())
    several = {str(pair.site) for group in groups if len(group) > 1 for pair in group}
    assert any("error_ratio_expert" in found[site].metrics for site in several)
    assert any(":weights@decode" in site for site in several)


@pytest.fixture
def replace(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Return what lets the candidate hold one number all over a site."""
    read, candidate = evaluate.load, sides[1]

    def by(site: str, value: float) -> None:
        def load(own: SideRecord) -> torch.Tensor:
            values = read(own)
            theirs = own.source in candidate.sources and str(own.record.site) == site
            return torch.full_like(values, value) if theirs else values

        for module in (decode_steps, evaluate):
            monkeypatch.setattr(module, "load", load)

    return by


@pytest.mark.parametrize("sides", ["isolated"], indirect=True)
def test_weights_of_experts_that_one_side_chose_are_as_by_themselves(
    sides: Sides, replace: Callable[[str, float], None]
) -> None:
    replace("layers.1.mlp.gate:choices@decode.1", 0)
    found, expected = together(sides), one_by_one(sides)
    for name, measured in found.items():
        same(measured, expected[name])
    apart = [name for name, each in found.items() if each.nothing is not None]
    # Another processor may round a score of this candidate over a neighbour's: at other sites.
    assert "layers.1.mlp.gate:weights@decode.1" in apart
    assert {name.partition("@")[0].partition(".mlp")[2] for name in apart} == {".gate:weights"}


@pytest.mark.parametrize("sides", ["isolated"], indirect=True)
@pytest.mark.parametrize("value", [math.nan, 0.0], ids=str)
def test_a_step_that_is_not_finite_or_constant_is_as_by_itself(
    sides: Sides, value: float, replace: Callable[[str, float], None]
) -> None:
    site = "layers.1.mlp.gate:logits@decode.1"
    replace(site, value)
    found, expected = together(sides), one_by_one(sides)
    for name, measured in found.items():
        same(measured, expected[name])
    name = "nonfinite_disagreement" if math.isnan(value) else "candidate_constant"
    assert name in found[site].metrics


@pytest.mark.parametrize("sides", ["isolated"], indirect=True)
def test_a_site_by_itself_has_all_threads(
    sides: Sides, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, candidate, aligned, calibration = sides
    had: list[int] = []
    monkeypatch.setattr(
        decode_steps, "measure", lambda *_, **__: had.append(torch.get_num_threads())
    )
    alone = next(each for each in aligned.pairs if each.site.phase == PREFILL)
    decode_steps.measure_steps([alone], golden, candidate, calibration, aligned.blocks)
    assert had == [threads]
