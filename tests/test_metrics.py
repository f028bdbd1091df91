"""Each metric against a plain formula, at ordinary and degenerate tensors, in pieces and whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerparity.anatomy.site import Kind
from layerparity.ground import registry
from layerparity.numbers.metric import Chunk, Metric, Stream, every_metric, metrics_for
from layerparity.numbers.metrics import absolute
from layerparity.numbers.pair_sums import BINS, DROPPED_BITS, PairSums, plain_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = ("max_abs_diff", "mean_abs_diff", "median_abs_diff", "std_abs_diff", "rel_l2")
EXPECTED = {
    *ERRORS,
    "cosine_distance",
    "pearson",
    "similarity_percentage",
    "norm_ratio",
    "snr_db",
    "ulp_distance",
    "nonfinite_disagreement",
}


def measure(golden: torch.Tensor, candidate: torch.Tensor, pieces: int = 1) -> dict[str, float]:
    stream = Stream(Kind.REAL)
    parts = zip(golden.reshape(-1).chunk(pieces), candidate.reshape(-1).chunk(pieces), strict=True)
    for left, right in parts:
        stream.feed(Chunk(left, right))
    return stream.results()


def noisy(dtype: torch.dtype, noise: float = 1e-2, size: int = 4099) -> tuple[torch.Tensor, ...]:
    maker = torch.Generator().manual_seed(1)
    golden = torch.randn(size, generator=maker).to(dtype)
    other = golden.float() + noise * torch.randn(size, generator=maker)
    return golden, other.to(dtype)


def test_every_metric_of_the_issue_is_there() -> None:
    assert set(metrics_for(Kind.REAL)) == EXPECTED
    assert set(metrics_for(Kind.INDEX_SET)) == {"set_agreement"}
    assert "unequal" in metrics_for(Kind.EXACT)
    assert set(metrics_for(Kind.MASK)) == {"unequal"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_formulas(dtype: torch.dtype) -> None:
    golden, candidate = noisy(dtype)
    found = measure(golden, candidate)
    g, c = golden.double(), candidate.double()
    gaps = (c - g).abs()
    plain = {
        "max_abs_diff": gaps.max(),
        "mean_abs_diff": gaps.mean(),
        "std_abs_diff": gaps.std(),
        "rel_l2": (c - g).norm() / g.norm(),
        "cosine_distance": (c / c.norm() - g / g.norm()).square().sum() / 2,
        "pearson": torch.corrcoef(torch.stack([g, c]))[0, 1],
        "similarity_percentage": 100 * torch.isclose(g, c, rtol=1e-3, atol=1e-3).double().mean(),
        "norm_ratio": c.norm() / g.norm(),
        "snr_db": 20 * torch.log10(g.norm() / (c - g).norm()),
    }
    for name, value in plain.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9), name
    assert found["nonfinite_disagreement"] == 0


@pytest.mark.parametrize("noise", [1e-30, 1e-6, 1e-2, 1.0, 1e6])
def test_the_median_is_within_its_error_bound(noise: float) -> None:
    golden = torch.zeros(10001)
    candidate = noise * torch.rand(10001, generator=torch.Generator().manual_seed(0))
    exact = float(candidate.abs().double().median())
    assert measure(golden, candidate, 7)["median_abs_diff"] == pytest.approx(exact, rel=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_do_not_matter(dtype: torch.dtype) -> None:
    golden, candidate = noisy(dtype)
    whole, pieces = measure(golden, candidate), measure(golden, candidate, 13)
    for name, value in whole.items():
        assert pieces[name] == pytest.approx(value, rel=1e-12), name


def test_equal_tensors() -> None:
    golden, _ = noisy(torch.float32)
    found = measure(golden, golden.clone(), 3)
    for name in (*ERRORS, "cosine_distance", "ulp_distance", "nonfinite_disagreement"):
        assert found[name] == 0, name
    assert (found["similarity_percentage"], found["norm_ratio"]) == (100, 1)
    assert found["pearson"] == pytest.approx(1, abs=1e-15)
    assert found["snr_db"] == 320


def test_cosine_distance_keeps_what_a_cancelled_sum_loses() -> None:
    golden = torch.tensor([1.0, 0.0], dtype=torch.float64)
    candidate = torch.tensor([1.0, 1e-10], dtype=torch.float64)
    assert measure(golden, candidate)["cosine_distance"] == pytest.approx(5e-21, rel=1e-9)
    assert measure(golden, -candidate)["cosine_distance"] == pytest.approx(2)
    assert measure(golden, 3 * golden)["cosine_distance"] == 0


def test_cosine_is_blind_to_scale_and_the_norm_ratio_is_not() -> None:
    golden, _ = noisy(torch.float32)
    found = measure(golden, golden * 1.5)
    assert found["cosine_distance"] < 1e-12
    assert found["norm_ratio"] == pytest.approx(1.5)


def test_pearson_stays_within_one_for_near_constant_tensors() -> None:
    steps = torch.arange(1000) % 2
    golden = (1000.0 + steps * 6.2e-5).float()
    assert golden.unique().numel() == 2
    assert measure(golden, golden.clone(), 9)["pearson"] == pytest.approx(1, abs=1e-9)
    assert measure(golden, golden.flip(0), 9)["pearson"] == pytest.approx(-1, abs=1e-9)
    for seed in range(20):
        maker = torch.Generator().manual_seed(seed)
        values = torch.randn(101, generator=maker) * 1e-3 + 7
        assert -1 <= measure(values, values * 2, 3)["pearson"] <= 1


@pytest.mark.parametrize("value", [0.1, -3.3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pearson_of_constants_is_defined(value: float, dtype: torch.dtype) -> None:
    # A float64 mean of equal values is not quite that value.
    flat = torch.full((1000,), value, dtype=dtype)
    varied = torch.randn(1000)
    assert measure(flat, flat + abs(value), 7)["pearson"] == 1
    assert measure(flat, varied, 7)["pearson"] == 0
    assert measure(varied, flat, 7)["pearson"] == 0


def test_all_zero() -> None:
    zero, other = torch.zeros(10), torch.ones(10)
    both, golden, candidate = measure(zero, zero), measure(zero, other), measure(other, zero)
    assert (both["rel_l2"], both["cosine_distance"], both["norm_ratio"]) == (0, 0, 1)
    assert (golden["rel_l2"], golden["norm_ratio"]) == (math.inf, math.inf)
    assert (golden["cosine_distance"], golden["snr_db"]) == (1, -320)
    assert (candidate["rel_l2"], candidate["cosine_distance"], candidate["norm_ratio"]) == (1, 1, 0)


def test_one_element() -> None:
    found = measure(torch.tensor([2.0]), torch.tensor([2.5]))
    assert (found["max_abs_diff"], found["mean_abs_diff"]) == (0.5, 0.5)
    assert math.isnan(found["std_abs_diff"]), "as torch.std of one number"
    assert (found["pearson"], found["norm_ratio"]) == (1, 1.25)


def test_empty_tensors_are_undefined_not_perfect() -> None:
    found = measure(torch.empty(0), torch.empty(0))
    assert found.pop("nonfinite_disagreement") == 0
    assert all(math.isnan(value) for value in found.values()), found


def test_denormals() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal / 2**10
    golden = torch.full((100,), tiny)
    found = measure(golden, golden * 1.5)
    assert found["rel_l2"] == pytest.approx(0.5, rel=1e-3)
    assert found["norm_ratio"] == pytest.approx(1.5, rel=1e-3)
    assert found["ulp_distance"] == 2**12


def test_nan_and_inf_are_counted_and_leave_the_errors_alone() -> None:
    golden = torch.tensor([1.0, 2.0, 3.0, 4.0, math.inf, math.nan])
    candidate = torch.tensor([1.5, math.nan, math.inf, 4.0, -math.inf, math.nan])
    found = measure(golden, candidate)
    assert found["nonfinite_disagreement"] == 3
    assert found["max_abs_diff"] == 0.5
    assert found["similarity_percentage"] == pytest.approx(100 / 6)
    assert all(math.isfinite(value) for value in found.values())


def test_all_nan() -> None:
    found = measure(torch.ones(4), torch.full((4,), math.nan))
    assert found["nonfinite_disagreement"] == 4
    assert math.isnan(found["max_abs_diff"]) and math.isnan(found["pearson"])
    assert found["similarity_percentage"] == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("start", [1.0, -3.0, 0.0])
def test_ulp_counts_representable_steps(dtype: torch.dtype, start: float) -> None:
    up = torch.tensor([math.inf], dtype=dtype)
    golden = torch.tensor([start], dtype=dtype)
    candidate = golden
    for steps in range(1, 6):
        candidate = torch.nextafter(candidate, up)
        assert measure(golden, candidate)["ulp_distance"] == steps
        assert measure(candidate, golden)["ulp_distance"] == steps


def test_ulp_across_zero_and_across_the_whole_range() -> None:
    assert measure(torch.tensor([-0.0]), torch.tensor([0.0]))["ulp_distance"] == 0
    least = torch.tensor([2.0**-149])
    assert measure(-least, least)["ulp_distance"] == 2
    huge = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert measure(-huge, huge)["ulp_distance"] == 2 * 0x7F7FFFFF


def test_ulp_is_in_the_candidates_dtype() -> None:
    golden = torch.tensor([1.0 + 2**-9], dtype=torch.float32)
    assert measure(golden, torch.tensor([1.0]).bfloat16())["ulp_distance"] == 0
    assert measure(golden, torch.tensor([1.0 + 2**-7]).bfloat16())["ulp_distance"] == 1


def test_similarity_is_relative_to_the_candidate_as_isclose_has_it() -> None:
    golden, candidate = torch.tensor([100.0]), torch.tensor([100.1015])
    assert measure(golden, candidate)["similarity_percentage"] == 0
    candidate = torch.tensor([100.10105])
    assert measure(golden, candidate)["similarity_percentage"] == 100
    assert measure(candidate, golden)["similarity_percentage"] == 0


def stream_of(kind: Kind, golden: torch.Tensor, candidate: torch.Tensor) -> dict[str, float]:
    stream = Stream(kind)
    stream.feed(Chunk(golden, candidate))
    return stream.results()


def test_sets_agree_in_any_order() -> None:
    golden = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    candidate = torch.tensor([[2, 1], [3, 4], [5, 7], [8, 8]], dtype=torch.int32)
    assert stream_of(Kind.INDEX_SET, golden, candidate)["set_agreement"] == 0.5


def test_equality_is_of_bits_after_the_candidates_cast() -> None:
    golden = torch.tensor([1.0 + 2**-12, 2.0, math.nan, 0.0])
    same = stream_of(Kind.EXACT, golden, golden.bfloat16())
    assert same["unequal"] == 0
    other = torch.tensor([1.0 + 2**-12, 2.0 + 2**-20, math.nan, -0.0])
    assert stream_of(Kind.EXACT, golden, other)["unequal"] == 2
    mask = torch.tensor([True, False])
    assert stream_of(Kind.MASK, mask, ~mask)["unequal"] == 2


def test_a_chunk_refuses_two_shapes() -> None:
    with pytest.raises(ValueError, match="against"):
        Chunk(torch.zeros(2), torch.zeros(3))


def test_shared_numbers_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    original = torch.Tensor.double
    monkeypatch.setattr(
        torch.Tensor, "double", lambda self: calls.append(self.dtype) or original(self)
    )
    measure(torch.ones(100), torch.ones(100))
    # One conversion of each side; the median's bin edges are the third.
    assert len(calls) <= 3


def test_metrics_are_frozen() -> None:
    metric: Metric = metrics_for(Kind.REAL)["rel_l2"]
    with pytest.raises(AttributeError):
        metric.kinds = ()  # type: ignore[misc]


def test_a_name_stands_for_one_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load", lambda package, name: absolute)
    with pytest.raises(ValueError, match="two metrics have one name"):
        every_metric.__wrapped__()


def test_equality_is_judged_in_the_narrower_dtype():
    wide = torch.randn(64)
    narrow = wide.to(torch.bfloat16)
    for golden, candidate in ((narrow, wide), (wide, narrow)):
        stream = Stream(Kind.EXACT)
        stream.feed(Chunk(golden, candidate))
        assert stream.results()["unequal"] == 0


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_median_is_that_of_the_whole_histogram_to_the_bit(chunks: int) -> None:
    """Worked out of the bins that hold anything, it is what the sum over all bins gives."""
    golden = torch.randn(3, 41, generator=torch.Generator().manual_seed(1))
    candidate = golden + 1e-3 * torch.randn(3, 41, generator=torch.Generator().manual_seed(2))
    stream, whole = Stream(Kind.REAL), np.zeros(BINS, dtype=np.int64)
    for left, right in zip(golden.chunk(chunks), candidate.chunk(chunks), strict=True):
        stream.feed(Chunk(left, right))
        bins = (right.double() - left.double()).abs().float().view(torch.int32) >> DROPPED_BITS
        whole += np.bincount(bins.reshape(-1).numpy(), minlength=BINS)
    index = int(np.searchsorted(np.cumsum(whole), (golden.numel() + 1) // 2))
    edges = (np.array([index, index + 1], dtype=np.int32) << DROPPED_BITS).view(np.float32)
    assert stream.results()["median_abs_diff"] == edges.astype(np.float64).mean()


def test_the_sums_of_a_single_piece_are_those_of_a_merge_to_the_bit() -> None:
    golden = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    piece, _ = plain_sums(golden, golden * 1.001)
    merged = PairSums()
    merged.merge(piece)
    for name, value in vars(piece).items():
        assert np.array_equal(getattr(merged, name), value, equal_nan=name[:3] == "max"), name
