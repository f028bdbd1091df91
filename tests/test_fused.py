"""The compiled kernel against the plain formulas, at every dtype and at whatever is degenerate."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from layerparity.anatomy.site import Kind
from layerparity.numbers import fused, metric, pair_sums
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.metric import Chunk, Stream
from layerparity.numbers.pair_sums import PairSums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(left, right) for left in DTYPES for right in DTYPES]
COUNTED = (
    "size",
    "count",
    "similar",
    "nonfinite_disagreement",
    "golden_nonfinite",
    "max_abs_diff",
    "max_ulp",
)
SUMMED = {
    each.name for each in fields(PairSums) if each.name not in (*COUNTED, "moments", "histogram")
}


def agree(golden: torch.Tensor, candidate: torch.Tensor, close: Closeness = CLOSE) -> PairSums:
    """Assert that both ways give the same numbers, and return them."""
    found, squares = fused.fused_sums(golden, candidate, close)
    plain, expected = pair_sums.plain_sums(golden, candidate, close)
    for name in COUNTED:
        left, right = getattr(found, name), getattr(plain, name)
        assert left == right or (math.isnan(left) and math.isnan(right)), name
    # Sums of both signs are judged against what they could be, the sum of absolute products.
    scale = math.sqrt(plain.golden_squares) * math.sqrt(plain.diff_squares)
    for name in SUMMED:
        bound = 1e-12 * scale if name == "golden_diff" else 1e-300
        close = pytest.approx(getattr(plain, name), rel=1e-12, abs=bound)
        assert getattr(found, name) == close, name
    _moments_agree(found, plain)
    assert np.array_equal(found.histogram, plain.histogram)
    np.testing.assert_allclose(squares, expected, rtol=1e-12)
    return found


def _moments_agree(fused: PairSums, plain: PairSums) -> None:
    left, right = fused.moments, plain.moments
    assert left.size == right.size
    for squares, mean in (("gg", "golden"), ("cc", "candidate")):
        # A float64 mean is uncertain by 1e-16 of the largest values, and so is what is left of it.
        size = math.sqrt(getattr(plain, f"{mean}_squares") / max(1, plain.count))
        assert getattr(left, mean) == pytest.approx(
            getattr(right, mean), rel=1e-9, abs=1e-13 * size
        )
        noise = plain.count * (1e-14 * size) ** 2
        assert getattr(left, squares) == pytest.approx(getattr(right, squares), rel=1e-9, abs=noise)
    assert left.gc == pytest.approx(right.gc, rel=1e-9, abs=1e-9 * math.sqrt(right.gg * right.cc))


def noisy(rows: int, width: int, noise: float = 1e-2) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(rows * width)
    golden = torch.randn(rows, width, generator=maker)
    return golden, golden + noise * torch.randn(rows, width, generator=maker)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4096), (2, 5001), (700, 129)])
def test_random(pair: tuple[torch.dtype, torch.dtype], shape: tuple[int, int]) -> None:
    golden, candidate = noisy(*shape)
    agree(golden.to(pair[0]), candidate.to(pair[1]))


@pytest.mark.parametrize("close", [Closeness(0.01, 1e-5), Closeness(0, 0.005), Closeness(0.2, 0)])
def test_the_constants_of_similarity_reach_the_kernel(close: Closeness) -> None:
    golden, candidate = noisy(5, 4096)
    found = agree(golden, candidate, close)
    right = torch.isclose(golden.double(), candidate.double(), close.rtol, close.atol)
    assert found.similar == int(right.sum())
    assert 0 < found.similar < found.size


@pytest.mark.parametrize("noise", [0.0, 1e-40, 1e-6, 1e3, 1e30])
def test_noise_of_any_size(noise: float) -> None:
    golden, candidate = noisy(3, 3000, noise)
    agree(golden, candidate)
    agree(golden.bfloat16(), candidate.bfloat16())


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_not_finite(pair: tuple[torch.dtype, torch.dtype]) -> None:
    golden, candidate = noisy(9, 4500)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    maker = torch.Generator().manual_seed(0)
    for side in (golden, candidate):
        where = torch.randint(0, 3 * 4500, (4000,), generator=maker)
        side.view(-1)[where] = odd[torch.randint(0, 4, where.shape, generator=maker)]
    found = agree(golden.to(pair[0]), candidate.to(pair[1]))
    assert 0 < found.nonfinite_disagreement < found.size - found.count
    _, squares = fused.fused_sums(golden.to(pair[0]), candidate.to(pair[1]))
    assert np.isinf(squares[1, :3]).all() and np.isfinite(squares[1, 3:]).all()


def test_nothing_finite() -> None:
    found = agree(torch.full((2, 5000), math.nan), torch.ones(2, 5000))
    assert (found.count, found.golden_nonfinite) == (0, 10000)
    agree(torch.ones(2, 5000).bfloat16(), torch.full((2, 5000), math.inf).bfloat16())


def test_first_values_not_finite_leave_a_near_constant_tensor_exact() -> None:
    golden = (1000.0 + (torch.arange(6000) % 2) * 6.2e-5).view(2, -1)
    candidate = golden.clone()
    golden[0, :4500] = math.nan
    found = agree(golden, candidate)
    assert found.moments.gg == pytest.approx(found.count * (2**-14 / 2) ** 2, rel=1e-9)


@pytest.mark.parametrize("at", [1e-3, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0])
def test_means_far_from_zero_and_candidates_near_it(at: float, size: float) -> None:
    golden, candidate = noisy(5, 5000)
    found = agree(golden + at, size * (candidate + at))
    # Of independent formulas: numpy's two passes over float64.
    g, c = (golden + at).double().numpy(), (size * (candidate + at)).double().numpy()
    assert found.moments.gg == pytest.approx(g.var() * g.size, rel=1e-9)
    assert found.moments.cc == pytest.approx(c.var() * c.size, rel=1e-9)
    correlation = found.moments.gc / math.sqrt(found.moments.gg * found.moments.cc)
    assert correlation == pytest.approx(np.corrcoef(g.ravel(), c.ravel())[0, 1], rel=1e-12)


def test_segments_that_vary_and_that_do_not_are_merged() -> None:
    golden, candidate = noisy(6, 5000)
    golden[::2], candidate[1::3] = 7.5, -0.25
    found = agree(golden, candidate)
    g = golden.double().numpy()
    assert found.moments.gg == pytest.approx(g.var() * g.size, rel=1e-12)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, 3.3, 1e30, 3.4028234e38])
def test_constants(value: float) -> None:
    same = torch.full((3, 5000), value)
    assert agree(same, same.clone()).moments.gg == 0
    agree(same, -same)
    agree(same, torch.randn(3, 5000))
    agree(same.bfloat16(), torch.randn(3, 5000).bfloat16())


def test_every_pair_of_bfloat16() -> None:
    # All patterns on one side against all of them in another order, and in float32's rounding.
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    golden = every.view(torch.bfloat16).view(16, -1)
    for step in (1, 3, 257, 32768):
        agree(golden, every.roll(step).view(torch.bfloat16).view(16, -1))
    wide = (every.int() << 16) + torch.randint(0, 1 << 16, every.shape, dtype=torch.int32)
    agree(wide.view(torch.float32).view(16, -1), golden)
    agree(golden, wide.view(torch.float32).view(16, -1))


def test_views() -> None:
    golden, candidate = noisy(60, 80)
    agree(golden.t(), candidate.t())
    agree(golden[::2, 1:], candidate[::2, 1:])
    agree(golden.bfloat16()[:, ::3], candidate.bfloat16()[:, ::3])


def test_threads_change_nothing(threads: int) -> None:
    golden, candidate = noisy(1000, 1500)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = fused.fused_sums(golden, candidate)
    torch.set_num_threads(before)
    shared = fused.fused_sums(golden, candidate)
    assert np.array_equal(alone[1], shared[1])
    assert np.array_equal(alone[0].histogram, shared[0].histogram)
    for name in (*COUNTED, *SUMMED, "moments"):
        assert getattr(alone[0], name) == getattr(shared[0], name), name


def results(golden: torch.Tensor, candidate: torch.Tensor) -> dict[str, float]:
    stream = Stream(Kind.REAL)
    stream.feed(Chunk(golden, candidate))
    return stream.results()


def test_large_chunks_are_fused_and_metrics_the_same_without_numba(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden, candidate = noisy(100, 3000)
    asked: list[int] = []
    original = fused.fused_sums
    monkeypatch.setattr(
        fused, "fused_sums", lambda *pair: asked.append(pair[0].numel()) or original(*pair)
    )
    compiled = results(golden, candidate)
    monkeypatch.setattr(metric, "find_spec", lambda name: None)
    plain = results(golden, candidate)
    assert asked == [300_000]
    assert compiled == pytest.approx(plain, rel=1e-12)


def test_float64_and_integers_take_the_plain_way() -> None:
    golden, candidate = noisy(100, 3000)
    assert not fused.takes(golden.double(), candidate)
    assert not fused.takes(golden, candidate.int())
    assert results(golden.double(), candidate.double())["rel_l2"] < 0.02


def test_a_wider_golden_is_rounded_half_to_even() -> None:
    golden = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]])
    candidate = torch.tensor([[1, 1 + 2**-6, -1, 1 + 2**-7]]).bfloat16()
    assert agree(golden, candidate).max_ulp == 0
