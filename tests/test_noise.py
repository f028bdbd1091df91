"""Noise: sums in pieces against dense formulas; clean rounding passes, small slips do not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from layerparity.anatomy.site import Kind, Site
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.numbers import site_sums as streamed
from layerparity.numbers import token_sums
from layerparity.numbers.arithmetic import Product, backwards, sharded, strided
from layerparity.numbers.chance import as_many_alike
from layerparity.numbers.clean import wider
from layerparity.numbers.clean_slopes import ChainedSample, CleanSlopes, SlopeSample
from layerparity.numbers.deviation import Deviation, JudgedSite, deviation
from layerparity.numbers.floor import Floor, measure_floor, scales
from layerparity.numbers.token_factors import FEW, freedom_among, standing_out, ways_apart
from layerparity.numbers.token_sums import TokenLayout
from layerparity.numbers.typical_floor import TypicalFloor
from layerparity.record.folder import RunFolder
from layerparity.record.references import ISOLATED, ReferenceWriter, StoredReferences
from layerparity.report.reasons import breach_text

TYPES = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "fp32, fp64": (torch.float32, torch.float64),
    "fp64": (torch.float64, torch.float64),
}
SHAPES = [(1, 1, 0), (1, 64, 4), (40, 1, 0), (37, 96, 8), (FEW, 2 * token_sums.PIECE + 5, 0)]
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, token_sums.PIECE], ids=["a token at once", "usual pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sums, "PIECE", request.param)
    monkeypatch.setattr(streamed, "BLOCK", 16 * request.param)


def site(
    shape: tuple[int, int, int], types: str, experts: int = 0, floor: Floor | None = None
) -> JudgedSite:
    """Return a site of random values, some elements massive, some tokens left out."""
    tokens, elements, heads = shape
    dtype, wide = TYPES[types]
    maker = torch.Generator().manual_seed(elements)
    reference = torch.randn(tokens, elements, generator=maker, dtype=torch.float64)
    reference[:, ::37] *= 100
    noise = 1e-3 * torch.randn(4, tokens, elements, generator=maker, dtype=torch.float64)
    candidate, golden, *ways = (reference * (1 + noise)).to(dtype)
    mask = torch.rand(tokens, generator=maker) < 0.8
    mask[0] = True
    laid = TokenLayout(elements, heads)
    named = {"one": ways[0], "two": ways[1]}
    floor = floor or measure_floor(named, golden, reference.to(wide), mask, laid)
    count = int(mask.sum())
    routed = torch.rand(count, experts, generator=maker) < 0.3 if experts else None
    return JudgedSite(
        candidate=candidate[mask],
        golden=golden[mask],
        reference=reference.to(wide)[mask],
        tokens=torch.nonzero(mask).flatten(),
        real=count,
        layout=laid,
        floor=floor,
        clean=CleanSlopes(floor.slopes),
        epsilon=torch.finfo(dtype).eps,
        experts=routed,
    )


def close(left: torch.Tensor, right: torch.Tensor, size: torch.Tensor | float = 0.0) -> None:
    """Assert equality to 1e-9 of the value, or of what its terms add up to without signs."""
    assert ((left - right).abs() <= 1e-9 * torch.maximum(right.abs(), torch.as_tensor(size))).all()


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("pieces")
def test_sums_are_the_dense_ones(shape: tuple[int, int, int], types: str) -> None:
    given = site(shape, types)
    scale = scales(given.floor.elements)
    c, g, r = (each.double() for each in (given.candidate, given.golden, given.reference))
    before = [each.clone() for each in (given.candidate, given.golden, given.reference)]
    found = streamed.plain_site_sums(given.sides, scale, given.layout)
    for each, old in zip((given.candidate, given.golden, given.reference), before, strict=True):
        assert torch.equal(each, old)
    for axis, error, square in (
        (1, found.error_tokens, found.square_tokens),
        (0, found.error_elements, found.square_elements),
    ):
        close(error, (c - r).square().sum(axis))
        close(square, r.square().sum(axis))
    assert found.own == pytest.approx(float((g - r).square().sum()), rel=1e-9)
    close(found.differences, ((c - g) * scale).sum(0), ((c - g) * scale).abs().sum(0))
    close(found.weighed, ((c - r) * scale).square().sum(1))
    for grouping, shared in found.shared.items():
        p, q = (given.layout.sums(each * r * scale.square(), grouping) for each in (c - r, r))
        assert float(shared.sum()) == pytest.approx(float((p.square() / q).sum()), rel=1e-9)
    _regressions_are_the_dense_ones(found, (c - g) * scale, r * scale, given.layout)


def _regressions_are_the_dense_ones(
    found: token_sums.SiteSums, difference: torch.Tensor, scaled: torch.Tensor, layout: TokenLayout
) -> None:
    products, squares = difference * scaled, scaled.square()
    close(found.products, products.sum(1), products.abs().sum(1))
    close(found.squares, squares.sum(1))
    assert set(found.slopes) == set(layout.groupings)
    for grouping, slopes in found.slopes.items():
        p, q = (layout.sums(each, grouping) for each in (products, squares))
        size = layout.sums(products.abs(), grouping)
        close(slopes.p, p.sum(0), size.sum(0))
        close(slopes.q, q.sum(0))
        close(slopes.pp, p.square().sum(0), size.square().sum(0))
        close(slopes.pq, (p * q).sum(0), (size * q).sum(0))
        close(slopes.qq, q.square().sum(0))
        assert slopes.tokens == len(p)
    total = difference.sum(1)
    close(found.offset.p, total.sum(), difference.abs().sum())
    close(found.offset.pp, total.square().sum(), difference.abs().sum(1).square().sum())
    assert float(found.offset.q) == difference.numel()


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.usefixtures("pieces")
def test_sums_by_expert_are_the_dense_ones(types: str) -> None:
    given = site((37, 96, 8), types, experts=5)
    assert given.experts is not None
    given.experts[:, 3] = False
    weight = scales(given.floor.elements).square()
    slope = torch.linspace(-1e-3, 1e-3, 5, dtype=torch.float64)
    c, g, r = (each.double() for each in (given.candidate, given.golden, given.reference))
    sent = given.experts.double().T
    apart = sent @ ((c - g) * r * weight) - slope.unsqueeze(1) * (sent @ (r.square() * weight))
    groups = token_sums.Sent.of(given.experts).groups(range(5))
    found = streamed.plain_apart(given.sides, weight, groups, slope)
    close(found, apart.square().sum(1))
    assert float(found[3]) == 0


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("pieces")
def test_floor_is_the_dense_one(shape: tuple[int, int, int], types: str) -> None:
    tokens, elements, heads = shape
    dtype, wide = TYPES[types]
    maker = torch.Generator().manual_seed(tokens)
    reference = torch.randn(tokens, elements, generator=maker, dtype=torch.float64)
    golden, *ways = (
        (reference + 1e-2 * torch.randn(tokens, elements, generator=maker)).to(dtype)
        for _ in range(3)
    )
    reference = reference.to(wide)
    mask = torch.rand(tokens, generator=maker) < 0.7
    mask[0] = True
    # What stands in padding is nobody's business.
    ways[0][~mask] = math.nan
    before = [each.clone() for each in (golden, reference, *ways)]
    laid = TokenLayout(elements, heads)
    found = measure_floor(dict(zip("ab", ways, strict=True)), golden, reference, mask, laid)
    for each, old in zip((golden, reference, *ways), before, strict=True):
        assert torch.equal(each[mask], old[mask])
    squares = torch.stack([(way.double() - reference.double()).square() for way in ways])
    torch.testing.assert_close(found.tokens[:, mask], squares.sum(2)[:, mask])
    torch.testing.assert_close(found.elements, squares[:, mask].sum(1))
    assert found.real is not None
    torch.testing.assert_close(found.real[0], squares.sum(2)[:, mask].amax(0))
    torch.testing.assert_close(found.real[1], reference[mask].double().square().sum(1))
    weight = scales(found.elements).square()
    wide_values = reference[mask].double()
    for grouping in laid.groupings:
        q = laid.sums(wide_values.square().sum(0) * weight, grouping)
        largest = []
        for way, error in zip(ways, found.elements, strict=True):
            products = (way[mask].double() - golden[mask].double()) * wide_values
            p = laid.sums(products.sum(0) * weight, grouping)
            noise = laid.sums(error.double() * weight, grouping)
            largest.append(float((p.square() / (q * noise).clamp_min(1e-300)).max()))
        assert found.slopes[grouping].ways == 2
        assert found.slopes[grouping].square == pytest.approx(sum(largest) / 2, rel=1e-6)
    if tokens < FEW:
        assert found.weighed is None and found.factors == {}
        return
    errors = [way[mask].double() - wide_values for way in ways]
    weighed = torch.stack([(error.square() * weight).sum(1) for error in errors])
    assert found.weighed is not None
    torch.testing.assert_close(found.weighed[mask], weighed.amax(0))
    assert set(found.factors) == set(laid.groupings) - {"channel"}
    for grouping, share in found.factors.items():
        q = laid.sums(wide_values.square() * weight, grouping)
        products = [laid.sums(error * wide_values * weight, grouping) for error in errors]
        shared = [
            float((p.square() / q).sum() / e.sum()) for p, e in zip(products, weighed, strict=True)
        ]
        assert share == pytest.approx(max(shared), rel=1e-6)


def test_a_way_that_is_the_golden_is_no_sample() -> None:
    given = site((37, 96, 8), "bf16")
    mask = torch.ones(given.real, dtype=torch.bool)
    other = given.candidate
    alone, with_golden = (
        measure_floor(ways, given.golden, given.reference, mask, given.layout).slopes["whole"]
        for ways in ({"one": other}, {"one": other, "golden": given.golden})
    )
    assert (alone.ways, with_golden.ways) == (1, 1)
    none = measure_floor(
        {"golden": given.golden}, given.golden, given.reference, mask, given.layout
    )
    assert none.slopes["whole"] == SlopeSample(0.0, 0)
    # A processor that rounds what is left of a vector otherwise makes no other way of it.
    nearly = given.golden.clone()
    nearly[-1, -5:] = torch.nextafter(nearly[-1, -5:], torch.tensor(math.inf).to(nearly))
    assert not torch.equal(nearly, given.golden)
    beside = measure_floor(
        {"one": other, "nearly": nearly}, given.golden, given.reference, mask, given.layout
    ).slopes["whole"]
    assert beside.ways == 1
    assert beside.square == pytest.approx(with_golden.square, rel=0.05)
    seen = [SlopeSample(0.1, 3), SlopeSample(0.5, 1), SlopeSample(0.0, 0)]
    pooled, chained = SlopeSample.pooled(seen), ChainedSample.pooled(seen)
    assert pooled == SlopeSample(pytest.approx(0.2), 4)
    # The blocks of a chain show the same three ways.
    assert chained == ChainedSample(pytest.approx(0.2), 3)
    assert chained.expected > pooled.expected > pooled.square > 0
    assert SlopeSample.pooled([]) == SlopeSample(0.0, 0)
    assert ChainedSample.pooled([]) == ChainedSample(0.0, 0)


@pytest.mark.parametrize("ways", [1, 3, 4])
def test_a_chains_slope_is_as_rarely_beyond_the_limit_of_few_ways_as_of_many(ways: int) -> None:
    """Drawn: the squares of so few ways, and how often one more way is beyond the limit."""
    torch.manual_seed(ways)
    drawn = torch.randn(40_000_000 // (ways + 1), ways + 1)
    square, slope = drawn[:, :-1].square().mean(1), drawn[:, -1].abs()
    far = CalibratedTolerance().slope_z
    due = math.erfc(far / math.sqrt(2))
    beyond = slope > far * (square * ChainedSample(1.0, ways).expected).sqrt()
    assert float(beyond.double().mean()) == pytest.approx(due, rel=0.2)
    # As blocks that are apart are judged.
    apart = slope > far * (square * SlopeSample(1.0, ways).expected).sqrt()
    assert float(apart.double().mean()) > 20 * due


def test_the_slope_of_a_candidate_without_error_is_no_sharper_than_the_floor() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    clean = CleanSlopes({"whole": SlopeSample(0.01, 1000), "channel": SlopeSample(0.01, 1000)})
    usual, exact = (clean.variance("whole", noise, ones, 2 * ones) for noise in (ones, 0 * ones))
    torch.testing.assert_close(usual, 0.005 * ones, rtol=0.01, atol=0)
    torch.testing.assert_close(exact, usual / 4)
    torch.testing.assert_close(clean.variance("channel", 0 * ones, ones, 2 * ones), usual)
    torch.testing.assert_close(clean.variance("whole", 9 * ones, ones, 2 * ones), 9 * usual)


def all_finite(found: Deviation) -> bool:
    values = [*found.metrics.values(), *(v for each in found.profiles.values() for v in each)]
    return not any(math.isnan(value) for value in values)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-40, 1e18])
def test_constants_are_no_deviation_and_give_no_nan(
    shape: tuple[int, int, int], types: str, value: float
) -> None:
    given = site(shape, types, experts=4)
    for each in (given.candidate, given.golden, given.reference):
        each.fill_(value)
    laid, mask = given.layout, torch.ones(given.real, dtype=torch.bool)
    ways = {"one": given.golden.clone()}
    given.floor = measure_floor(ways, given.golden, given.reference, mask, laid)
    given.tokens, given.clean = torch.arange(given.real), CleanSlopes(given.floor.slopes)
    found = deviation(given)
    assert all_finite(found)
    assert found.metrics["slope"] == 0
    # Here the reference is that value itself: what the type cannot hold of it is the error.
    assert found.metrics["error_ratio"] <= 1


def test_something_where_nothing_should_be_has_no_bounds() -> None:
    given = site((37, 96, 8), "bf16")
    given.reference.zero_()
    given.floor = Floor(("one",), torch.zeros(1, 37), torch.zeros(1, 96))
    assert deviation(given).metrics["error_ratio"] > 1e30


def unchanged(value: torch.Tensor) -> torch.Tensor:
    return value


def rounded(
    tokens: int,
    change: Change = unchanged,
    product: Product = linear,
    dtype: torch.dtype = torch.bfloat16,
) -> Deviation:
    """Return how a product deviates, changed before it is rounded: 4 heads of 16, some massive.

    Its clean ways add each sum in two parts and in three.
    """
    maker = torch.Generator().manual_seed(tokens)
    value, weight = (torch.randn(n, 96, generator=maker) for n in (tokens, 64))
    value[:, 5] *= 60
    value[:, 50] += 40
    weight[7] *= 30
    value, weight = value.to(dtype), weight.to(dtype)
    wide = wider(dtype)
    reference, golden = linear(value.to(wide), weight.to(wide)), linear(value, weight)
    ways = {"golden": golden, "two": sharded(2)(value, weight), "three": strided(3)(value, weight)}
    laid, mask = TokenLayout(64, 4), torch.ones(tokens, dtype=torch.bool)
    floor = measure_floor(ways, golden, reference, mask, laid)
    candidate = product(value, weight) if change is unchanged else change(reference).to(dtype)
    return deviation(
        JudgedSite(
            candidate=candidate,
            golden=golden,
            reference=reference,
            tokens=torch.arange(tokens),
            real=tokens,
            layout=laid,
            floor=floor,
            clean=CleanSlopes(floor.slopes),
            epsilon=torch.finfo(dtype).eps,
        )
    )


def tiny(given: JudgedSite, scale: float) -> JudgedSite:
    """Return a site whose numbers are all smaller by a power of two."""
    candidate, golden, reference, *ways = (
        each * scale
        for each in (given.candidate, given.golden, given.reference, given.golden * 1.5)
    )
    mask = torch.ones(given.real, dtype=torch.bool)
    floor = measure_floor({"one": ways[0]}, golden, reference, mask, given.layout)
    return replace(given, candidate=candidate, golden=golden, reference=reference, floor=floor)


@pytest.mark.parametrize("types", ["bf16", "fp32"])
def test_the_smallest_numbers_are_judged_as_any_others(types: str) -> None:
    given = site((37, 96, 8), types)
    given = replace(given, tokens=torch.arange(given.real))
    usual, small = (deviation(tiny(given, scale)).metrics for scale in (1.0, 2.0**-80))
    assert usual["error_ratio"] > 0
    assert small == pytest.approx(usual, rel=1e-6)


def one_token(seed: int, product: Product, change: Change = unchanged) -> Deviation:
    """Return how one token deviates in bfloat16, where one massive channel outweighs the others.

    The typical floor is known of 40 more tokens.
    """
    maker = torch.Generator().manual_seed(seed)
    value, weight = (torch.randn(n, 96, generator=maker) for n in (41, 64))
    weight[7] *= 30
    value, weight = value.to(torch.bfloat16), weight.to(torch.bfloat16)
    reference, golden = linear(value.float(), weight.float()), linear(value, weight)
    ways = {"golden": golden, "two": sharded(2)(value, weight), "three": strided(3)(value, weight)}
    laid = TokenLayout(64, 4)

    def measured(rows: slice) -> Floor:
        few = {name: way[rows] for name, way in ways.items()}
        real = torch.ones(len(golden[rows]), dtype=torch.bool)
        return measure_floor(few, golden[rows], reference[rows], real, laid)

    first = slice(0, 1)
    everywhere, floor = measured(slice(None)), measured(first)
    assert everywhere.real is not None
    return deviation(
        JudgedSite(
            candidate=change(product(value, weight)[first]),
            golden=golden[first],
            reference=reference[first],
            tokens=torch.arange(1),
            real=1,
            layout=laid,
            floor=floor,
            clean=CleanSlopes(floor.slopes),
            epsilon=torch.finfo(torch.bfloat16).eps,
            typical=TypicalFloor.of(*everywhere.real),
        )
    )


@pytest.mark.parametrize("product", [sharded(4), strided(5)], ids=["sharded", "strided"])
def test_one_lucky_token_of_a_massive_channel_raises_no_alarm(product: Product) -> None:
    found = [one_token(seed, product) for seed in range(150)]
    assert [text for each in found for text in broken(each)] == []


def test_a_wrong_token_is_seen_where_a_massive_channel_outweighs_the_others() -> None:
    def drop(value: torch.Tensor) -> torch.Tensor:
        return value * torch.where(torch.arange(64) == 7, 0.9, 1.0)

    found = [one_token(seed, linear, drop) for seed in range(50)]
    assert sum(any("error is" in text for text in broken(each)) for each in found) > 35


@pytest.mark.parametrize("numbers", [1, 4, 32])
def test_how_many_numbers_a_floor_is_worth(numbers: int) -> None:
    maker = torch.Generator().manual_seed(numbers)
    floors = torch.randn(4000, numbers, generator=maker, dtype=torch.float64).square().sum(1)
    typical = TypicalFloor.of(floors, torch.ones(4000))
    assert typical is not None
    assert typical.freedom == pytest.approx(numbers, rel=0.25)


def test_a_typical_floor_needs_tokens() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    assert TypicalFloor.of(ones, ones) is None
    same = TypicalFloor.of(ones.repeat(2), ones.repeat(2))
    assert same is not None and math.isinf(same.freedom)
    assert same.raised_to_typical(0.5, 1.0, 1.0) == pytest.approx(0.97, abs=0.01)
    assert same.raised_to_typical(2.0, 1.0, 1.0) == 2.0


def broken(found: Deviation) -> list[str]:
    breaches = CalibratedTolerance().breaches(Kind.REAL, found.metrics)
    return [breach_text(breach, found.metrics) for breach in breaches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [64, 1024, 4096])
@pytest.mark.parametrize(
    "product", [sharded(4), strided(5), backwards], ids=["sharded", "strided", "backwards"]
)
def test_clean_rounding_breaks_no_limit(product: Product, tokens: int, dtype: torch.dtype) -> None:
    found = rounded(tokens, product=product, dtype=dtype)
    assert broken(found) == []
    assert found.metrics["error_ratio"] > 0


@pytest.mark.parametrize("tokens", [64, 1024, 4096])
def test_a_small_factor_is_seen_where_the_size_of_the_error_shows_nothing(tokens: int) -> None:
    found = rounded(tokens, lambda value: 1.003 * value)
    assert found.metrics["error_ratio"] < 2
    assert found.metrics["slope"] == pytest.approx(0.003, rel=0.1)
    assert any("a factor is off by +" in text for text in broken(found))


@pytest.mark.parametrize(("group", "numbers"), [("head", slice(32, 48)), ("channel", slice(9, 10))])
@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_slip_in_one_group_is_seen_there(group: str, numbers: slice, tokens: int) -> None:
    def slip(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, numbers] *= 1.01
        return value

    found = rounded(tokens, slip)
    index = {"head": 2, "channel": 9}[group]
    assert found.metrics[f"slope_{group}_index"] == index
    assert found.metrics[f"slope_{group}"] == pytest.approx(0.01, rel=0.2)
    assert any(f"of {group} {index} is off by +" in text for text in broken(found))


def one_factor_a_token(heads: int) -> Change:
    """Return a change of 1 in 512 (RMS) that is one factor for all numbers of each head of a token.

    It is what a norm, or a softmax, leaves that is rounded to bfloat16.
    """

    def change(value: torch.Tensor) -> torch.Tensor:
        maker = torch.Generator().manual_seed(7)
        factors = 1 + 2**-9 * torch.randn(value.shape[0], heads, 1, generator=maker)
        return (value.unflatten(1, (heads, -1)) * factors.to(value)).flatten(1)

    return change


@pytest.mark.parametrize(("heads", "name"), [(1, "slope_token"), (4, "slope_token_head")])
@pytest.mark.parametrize("tokens", [16, 256])
def test_a_factor_for_each_token_is_seen_where_nothing_else_is(
    heads: int, name: str, tokens: int
) -> None:
    found = rounded(tokens, one_factor_a_token(heads))
    assert found.metrics["error_ratio"] < 1.5
    assert found.metrics[name] == pytest.approx(2**-9, rel=0.4)
    said = broken(found)
    assert any("a factor of its own" in text for text in said)
    assert all("a factor of its own" in text for text in said)


def test_rounding_leaves_small_factors() -> None:
    clean = rounded(256, product=sharded(8)).metrics
    assert 0 < clean["slope_token_ratio"] < 1.2
    assert 0 < clean["slope_token_head_ratio"] < 1.2


@pytest.mark.parametrize("noise", [True, False], ids=["noise", "a factor"])
def test_one_token_of_a_long_prompt_stands_out(noise: bool) -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        value, maker = value.clone(), torch.Generator().manual_seed(1)
        one = torch.randn(64, generator=maker).to(value) if noise else 1.0
        value[120] *= 1 + 0.01 * one
        return value

    found = rounded(234, change)
    assert found.metrics["error_ratio"] < 2 and found.metrics["error_ratio_position"] < 8
    assert found.metrics["outlier_index"] == 120
    assert any("stands out" in text for text in broken(found))


@pytest.mark.parametrize("noisy", [0, 1, 2], ids=["as everywhere", "one token's", "two tokens'"])
def test_noise_that_is_one_token_s_is_known_as_well_as_that_token(noisy: int) -> None:
    """As where linear attention leaves a state near zero, whose norm is large by chance."""
    maker = torch.Generator().manual_seed(0)
    reference, laid = torch.randn(40, 64, generator=maker, dtype=torch.float64), TokenLayout(64, 0)

    def off(times: float = 1.0) -> torch.Tensor:
        noise = torch.randn(40, 64, generator=maker, dtype=torch.float64)
        for token in range(noisy):
            noise[token] *= 100 * torch.randn(1, generator=maker, dtype=torch.float64).abs()
        return (reference + 1e-3 * times * noise).float()

    def ratio(candidate: torch.Tensor) -> float:
        golden, *ways = off(), off(), off(), off()
        named = dict(zip("abc", ways, strict=True))
        floor = measure_floor(named, golden, reference, torch.ones(40, dtype=torch.bool), laid)
        judged = JudgedSite(
            candidate, golden, reference, torch.arange(40), 40, laid, floor,
            CleanSlopes(floor.slopes), 2.0**-23,
        )  # fmt: skip
        return deviation(judged).metrics["error_ratio"]

    beyond = sum(ratio(off()) > 2 for _ in range(100))
    wrong = sum(ratio(off(12.0)) > 2 for _ in range(20))
    assert beyond <= 2
    assert wrong >= (12 if noisy else 20)


def test_an_error_that_is_one_token_s_is_known_as_well_as_tokens_alike() -> None:
    """As where two tokens of many are noisy, and the candidate is off at one of them alone."""
    floors, errors = torch.ones(2, 64, dtype=torch.float64)
    floors[:2] = 60.0
    assert float(as_many_alike(floors, errors)) == 64
    errors[0] = 65.0
    assert 4 < float(as_many_alike(floors, errors)) < 5
    assert float(as_many_alike(torch.ones_like(floors), errors)) == 64

    maker = torch.Generator().manual_seed(0)
    reference, laid = torch.randn(40, 64, generator=maker, dtype=torch.float64), TokenLayout(64, 0)

    def off(one: float, other: float) -> torch.Tensor:
        noise = torch.randn(40, 64, generator=maker, dtype=torch.float64)
        noise[7], noise[8] = noise[7] * one, noise[8] * other
        return (reference + 1e-5 * noise).float()

    ways = {name: off(10, 10) for name in "abc"}
    floor = measure_floor(ways, off(10, 10), reference, torch.ones(40, dtype=torch.bool), laid)

    def ratio(one: float, other: float) -> float:
        judged = JudgedSite(
            off(one, other), off(10, 10), reference, torch.arange(40), 40, laid, floor,
            CleanSlopes(floor.slopes), 2.0**-23,
        )  # fmt: skip
        return deviation(judged).metrics["error_ratio"]

    assert ratio(32, 5) < 1.7
    assert ratio(40, 40) > 2


def test_the_floor_of_a_noisy_token_is_not_drawn_down() -> None:
    """As at a gate of one number for each token, where one token is chaotic in all ways."""
    maker = torch.Generator().manual_seed(0)
    reference = torch.ones(64, 1, dtype=torch.float64)

    def off(times: float = 1.0) -> torch.Tensor:
        noise = torch.randn(64, 1, generator=maker, dtype=torch.float64)
        noise[7] = 1000 * times
        return (reference + 1e-5 * noise).float()

    ways = {name: off() for name in "abc"}
    mask, laid = torch.ones(64, dtype=torch.bool), TokenLayout(1, 0)
    floor = measure_floor(ways, off(), reference, mask, laid)
    for times, fine in ((2.0, True), (9.0, False)):
        judged = JudgedSite(
            off(times), off(), reference, torch.arange(64), 64, laid, floor,
            CleanSlopes(floor.slopes), 2.0**-23,
        )  # fmt: skip
        metrics = deviation(judged).metrics
        assert metrics["error_ratio_position_index"] == 7
        assert (metrics["error_ratio_position"] < 8) == fine


def test_ways_that_agree_at_most_tokens_are_one() -> None:
    """But for a remainder, and for the order in which squares are added up."""
    maker = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 40, generator=maker, dtype=torch.float64) + 0.5
    remainder, reordered = one.clone(), one * (1 + 1e-14)
    remainder[-7:] *= 1.1
    assert ways_apart(torch.stack([one, remainder, other, reordered])) == 2
    assert ways_apart(torch.stack([one, other, one * (1 + 1e-6)])) == 3


def test_a_token_stands_out_of_the_others_even_where_its_floor_is_nothing() -> None:
    errors = torch.ones(20, dtype=torch.float64)
    floors = errors.clone()
    assert standing_out(errors, floors, 3)[2] == 0
    errors[7], floors[3] = 100.0, 0.0
    index, ratio, z = standing_out(errors, floors, 3)
    assert (index, ratio) == (7, 10.0)
    assert z > 10
    assert standing_out(torch.zeros_like(errors), floors, 3) == (0, 0.0, 0.0)


def test_a_candidate_that_computes_as_one_way_does_has_the_luck_that_ways_have() -> None:
    """As at a gated norm of each head: a token's floor is small by luck, and no other's."""
    maker = torch.Generator().manual_seed(1)
    ways = torch.randn(3, 64, 2, generator=maker, dtype=torch.float64).square().sum(-1)
    floors, error = ways.amax(0), ways.amax(0)
    index, limit = int(error.argmin()), CalibratedTolerance().outlier_z
    error[index] *= 12
    among = freedom_among(ways)
    assert among is not None and 0.5 < among < 4
    assert standing_out(error, floors, 3, among)[2] < limit
    worst, ratio, z = standing_out(error, floors, 3)
    assert (worst, z > limit) == (index, True) and ratio > 3
    assert freedom_among(torch.ones(3, 64, dtype=torch.float64)) is None


@pytest.mark.parametrize("freedom", [1, 3, 30])
def test_a_floor_that_is_small_by_luck_makes_no_token_stand_out(freedom: int) -> None:
    maker = torch.Generator().manual_seed(freedom)
    largest = 0.0
    for _ in range(100):
        drawn = torch.randn(4, 256, freedom, generator=maker, dtype=torch.float64)
        error, *floors = drawn.square().sum(-1)
        largest = max(largest, standing_out(error, torch.stack(floors).amax(0), 3)[2])
    # Floors that are taken for exact give 22 here where one number counts.
    assert 2 < largest < CalibratedTolerance().outlier_z


def test_a_floor_of_few_tokens_says_nothing_of_factors_or_outliers() -> None:
    given = site((37, 96, 8), "bf16")
    floor = replace(given.floor, weighed=None, factors={}, freedom=None)
    usual, few = (deviation(each).metrics for each in (given, replace(given, floor=floor)))
    assert {name for name in usual if name not in few} == {
        *(f"slope_token{head}{end}" for head in ("", "_head") for end in ("", "_ratio")),
        *("outlier", "outlier_z", "outlier_index"),
    }


def test_a_large_site_takes_little_memory() -> None:
    code = """
import resource, torch
from layerparity.numbers.clean_slopes import CleanSlopes
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.floor import measure_floor
from layerparity.numbers.token_sums import TokenLayout
torch.set_num_threads(1)
golden = torch.randn(1024, 4096)
ways = {"one": golden * 1.001, "two": golden * 0.999}
routed = torch.zeros(1024, 64, dtype=torch.bool)
routed[:, :4] = True
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
mask, laid = torch.ones(1024, dtype=torch.bool), TokenLayout(4096, 32)
floor = measure_floor(ways, golden, golden, mask, laid)
deviation(JudgedSite(ways["one"], golden, golden, torch.arange(1024), 1024, laid, floor,
                  CleanSlopes(floor.slopes), 2**-8, routed))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 150


def test_the_typical_floor_is_pooled_over_prefill_and_steps(tmp_path: Path) -> None:
    writer, maker = ReferenceWriter(tmp_path), torch.Generator().manual_seed(0)
    tokens = []
    for step, count in ((0, 5), (1, 1), (2, 1)):
        golden = torch.randn(count + 1, 8, generator=maker)
        mask = torch.arange(count + 1) < count
        floor = measure_floor({"one": golden * 1.01}, golden, golden, mask, TokenLayout(8, 0))
        assert floor.real is not None
        tokens.append(floor.real)
        place = Site("layers.0.mlp", "out", "decode" if step else "prefill", step)
        writer.write("layers.0", ISOLATED, f"step.{step}", {place: (golden, {"float32": floor})})
    stored = StoredReferences(RunFolder(tmp_path), writer.finish())
    last = stored.find("layers.0", ISOLATED, Site("layers.0.mlp", "out", "decode", 2))
    assert last is not None
    assert stored.typical_floor(last, "float32") == TypicalFloor.of(*torch.cat(tokens, 1))
    assert stored.typical_floor(last, "bfloat16") is None


@pytest.mark.parametrize("part", ["all", "a head", "a channel"])
def test_a_factor_of_the_golden_alone_is_none_of_a_candidate_s(part: str) -> None:
    given = site((512, 32, 4), "fp32, fp64")
    within = {"all": slice(None), "a head": slice(8, 16), "a channel": slice(5, 6)}[part]
    name = {"all": "slope", "a head": "slope_head", "a channel": "slope_channel"}[part]
    golden, wrong = given.golden.clone(), given.candidate.clone()
    golden[:, within] *= 1 - 0.01
    wrong[:, within] *= 1 + 0.01
    right = deviation(replace(given, golden=golden)).metrics
    assert abs(right[name]) < 3e-4
    # Off the reference as well as off the golden, by the same factor or twice that.
    for own in (given.golden, golden):
        found = deviation(replace(given, golden=own, candidate=wrong)).metrics
        assert found[name] > 0.0095
        assert found[f"{name}_z"] > 6
