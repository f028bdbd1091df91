"""The table of fixed limits is that of the script it comes from: its formulas, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_masters import MASTERS, RUNS

from layerparity.anatomy.site import Kind
from layerparity.ground.errors import UserError
from layerparity.judge.again import judge_again
from layerparity.judge.conclude import conclude
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import open_side
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.numbers.closeness import Closeness
from layerparity.numbers.metric import Chunk, Stream
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Verdict

PAIRS = [
    ("bf16", "bf16-right"),
    ("bf16", "bf16-gate_up_swapped"),
    ("fp32", "fp32-right"),
    ("fp32", "fp32-in_bf16"),
]
OURS_BEFORE = Closeness(1e-2, 1e-5)


def by_the_script(gpu: torch.Tensor, neuron: torch.Tensor, close: Closeness) -> dict[str, float]:
    """Return the script's metrics of two tensors, as it computes them: in float32."""
    gpu, neuron = gpu.float(), neuron.float()
    gap = (gpu - neuron).abs()
    similar = torch.isclose(gpu, neuron, rtol=close.rtol, atol=close.atol)
    left, right = gpu.flatten(), neuron.flatten()
    cosine = torch.nn.functional.cosine_similarity(left.unsqueeze(0), right.unsqueeze(0))
    x, y = left - left.mean(), right - right.mean()
    return {
        "max_abs_diff": float(gap.max()),
        "mean_abs_diff": float(gap.mean()),
        "median_abs_diff": float(gap.median()),
        "std_abs_diff": float(gap.std()),
        "similarity_percentage": float(similar.float().mean() * 100),
        "cosine_distance": 1 - float(cosine),
        "pearson": float((x * y).sum() / (x.norm() * y.norm() + 1e-8)),
    }


def at_the_edge(gpu: torch.Tensor, neuron: torch.Tensor, close: Closeness) -> int:
    """Count elements so near to the allowed difference that float32 may see them on either side."""
    g, c = gpu.double(), neuron.double()
    apart = ((g - c).abs() - close.atol - close.rtol * c.abs()).abs()
    return int((apart <= 2.0**-22 * (g.abs() + c.abs() + close.atol)).sum())


def compared(golden: str, candidate: str, close: Closeness) -> Verdict:
    sides = [[from_folder(RUNS / name)] for name in (golden, candidate)]
    return conclude(*sides, FixedTolerance(rtol=close.rtol, atol=close.atol))


def stored(verdict: Verdict, golden: str, candidate: str) -> Iterator[tuple[dict[str, float], ...]]:
    """Yield the metrics of each site of numbers, and what the script makes of its real tokens."""
    left, right = (
        open_side(role, [from_folder(RUNS / name)])
        for role, name in (("golden", golden), ("candidate", candidate))
    )
    for row in verdict.rows:
        if row.kind is not Kind.REAL or row.site.end == "weights" or not row.metrics:
            continue
        own = left.records[row.site]
        g, c = (
            by_token(each.source.load(each.record), own.record.axes)
            for each in (own, right.records[row.site])
        )
        real = real_tokens(g, own.source.mask)
        yield row.metrics, (g[real], c[real])  # type: ignore[misc]


@pytest.mark.parametrize("close", [Closeness(), OURS_BEFORE], ids=["theirs", "other"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_metrics_of_stored_runs_are_the_script_s(
    pair: tuple[str, str], close: Closeness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MASTERS)
    verdict = compared(*pair, close)
    assert verdict.closeness == close
    sites = 0
    for found, (gpu, neuron) in stored(verdict, *pair):
        due = by_the_script(gpu, neuron, close)
        for name in ("max_abs_diff", "mean_abs_diff", "std_abs_diff"):
            assert found[name] == pytest.approx(due[name], rel=1e-4, abs=1e-9), name
        assert found["median_abs_diff"] == pytest.approx(due["median_abs_diff"], rel=2**-7)
        for name in ("cosine_distance", "pearson"):
            assert found[name] == pytest.approx(due[name], abs=2e-6), name
        slack = 100 * at_the_edge(gpu, neuron, close) / gpu.numel() + 1e-4
        assert found["similarity_percentage"] == pytest.approx(
            due["similarity_percentage"], abs=slack
        )
        sites += 1
    assert sites > 10


def test_the_constants_decide_and_theirs_are_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(MASTERS)
    assert FixedTolerance().closeness == Closeness(1e-3, 1e-3) == CalibratedTolerance().closeness
    theirs, other = (compared("bf16", "bf16-right", each) for each in (Closeness(), OURS_BEFORE))
    pairs = zip(theirs.rows, other.rows, strict=True)
    name = "similarity_percentage"
    apart = [abs(a.metrics[name] - b.metrics[name]) for a, b in pairs if name in a.metrics]
    assert max(apart) > 5


@pytest.mark.parametrize("shape", [(3, 50), (300, 400)], ids=["plain", "compiled"])
@pytest.mark.parametrize("close", [Closeness(), OURS_BEFORE])
def test_small_and_large_tensors_are_counted_by_the_constants(
    shape: tuple[int, int], close: Closeness
) -> None:
    maker = torch.Generator().manual_seed(3)
    golden = torch.randn(shape, generator=maker)
    candidate = golden + 3e-3 * torch.randn(shape, generator=maker)
    stream = Stream(Kind.REAL)
    stream.feed(Chunk(golden, candidate, close))
    right = torch.isclose(golden.double(), candidate.double(), close.rtol, close.atol)
    due = 100 * float(right.double().mean())
    assert stream.results()["similarity_percentage"] == pytest.approx(due, rel=1e-12)
    assert 5 < due < 95


def test_a_stored_comparison_says_that_it_cannot_count_by_other_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(MASTERS)
    verdict = compared("bf16", "bf16-right", OURS_BEFORE)
    with pytest.raises(UserError) as raised:
        judge_again(verdict, FixedTolerance())
    said = str(raised.value)
    assert "rtol=0.01 atol=1e-05, not with rtol=0.001 atol=0.001" in said
    assert "tolerance.rtol=0.01 tolerance.atol=1e-05, or compare the runs again" in said
    assert "\n" not in said
    same = judge_again(verdict, FixedTolerance(rtol=0.01, atol=1e-5, max_abs_diff=1e9))
    assert same.closeness == OURS_BEFORE
    # What judges nothing by similar elements takes the numbers as they are, and keeps their name.
    assert judge_again(verdict, CalibratedTolerance()).closeness == OURS_BEFORE
