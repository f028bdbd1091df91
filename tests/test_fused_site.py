"""The compiled sums of a calibrated site against torch's, at every dtype and odd layout."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from layerparity.numbers import deviation as judged
from layerparity.numbers import fused_site, site_kernel, site_sums
from layerparity.numbers.clean_slopes import CleanSlopes
from layerparity.numbers.decimals import shortened
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.floor import measure_floor
from layerparity.numbers.site_sums import Sides, plain_apart, plain_site_sums
from layerparity.numbers.token_sums import Sent, SiteSums, Slopes, TokenLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDER = (torch.float32, torch.float64)
# Tokens, elements and heads: odd, a head longer than a part, more rows than a task has, one token.
SHAPES = [
    (1, 1, 0),
    (3, 7, 0),
    (40, 96, 8),
    (2, 5001, 0),
    (5, 2406, 2),
    (1300, 33, 3),
    (1, 4608, 9),
]
# Sums of terms of one sign; the others may be a small rest of large ones.
ONE_SIGN = ("error_tokens", "square_tokens", "error_elements", "square_elements", "squares")


def sides_of(
    shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], wide: torch.dtype
) -> tuple[Sides, torch.Tensor, TokenLayout]:
    """Return candidate, golden and reference of random values, scales and the layout."""
    tokens, elements, heads = shape
    maker = torch.Generator().manual_seed(tokens * elements)
    reference = torch.randn(tokens, elements, generator=maker, dtype=torch.float64)
    reference[:, ::37] *= 100
    noise = 1 + 1e-2 * torch.randn(2, tokens, elements, generator=maker, dtype=torch.float64)
    candidate, golden = (
        (reference * each).to(kind) for each, kind in zip(noise, types, strict=True)
    )
    scale = torch.rand(elements, generator=maker, dtype=torch.float64) + 0.1
    return (candidate, golden, reference.to(wide)), scale, TokenLayout(elements, heads)


def close(found: torch.Tensor, plain: torch.Tensor, size: torch.Tensor | float, name: str) -> None:
    """Assert equality to 1e-12 of what the terms add up to without signs; NaN and Inf alike."""
    finite = torch.isfinite(plain)
    np.testing.assert_array_equal(found[~finite].numpy(), plain[~finite].numpy(), name)
    size = torch.as_tensor(size, dtype=torch.float64).expand_as(plain)
    assert ((found - plain).abs()[finite] <= 1e-12 * size[finite]).all(), name


def agree(sides: Sides, scale: torch.Tensor, layout: TokenLayout) -> SiteSums:
    """Assert that both ways give the same numbers, and return them."""
    found = fused_site.fused_site_sums(sides, scale, layout)
    plain = plain_site_sums(sides, scale, layout)
    c, g, r = (each.double() for each in sides)
    d, e, weight = (c - g).abs(), (c - r).abs(), scale.square()
    for name in ONE_SIGN:
        close(getattr(found, name), getattr(plain, name), getattr(plain, name), name)
    close(found.weighed, plain.weighed, plain.weighed, "weighed")
    close(torch.tensor(found.own), torch.tensor(plain.own), plain.own, "own")
    close(found.differences, plain.differences, (d * scale).sum(0), "differences")
    close(found.products, plain.products, (d * r.abs() * weight).sum(1), "products")
    assert set(found.shared) == set(plain.shared)
    for name, shared in plain.shared.items():
        p, q = (layout.sums(each * r.abs() * weight, name) for each in (e, r.abs()))
        size = (p.square() / q.clamp_min(1e-300)).sum(1)
        close(found.shared[name], shared, size, name)
    assert set(found.slopes) == set(plain.slopes)
    for name, slopes in plain.slopes.items():
        p, q = (layout.sums(each * weight, name) for each in (d * r.abs(), r.square()))
        _slopes_agree(found.slopes[name], slopes, p, q)
    each = (d * scale).sum(1, keepdim=True)
    _slopes_agree(found.offset, plain.offset, each, torch.full_like(each, layout.elements))
    return found


def _slopes_agree(found: Slopes, plain: Slopes, p: torch.Tensor, q: torch.Tensor) -> None:
    assert found.tokens == plain.tokens
    sizes = {"p": p, "q": q, "pp": p * p, "pq": p * q, "qq": q * q}
    for name, size in sizes.items():
        close(getattr(found, name), getattr(plain, name), size.sum(0), name)


@pytest.mark.parametrize("wide", WIDER, ids=str)
@pytest.mark.parametrize("candidate", DTYPES, ids=str)
@pytest.mark.parametrize("golden", DTYPES, ids=str)
def test_every_dtype(golden: torch.dtype, candidate: torch.dtype, wide: torch.dtype) -> None:
    agree(*sides_of((40, 96, 8), (candidate, golden), wide))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layout(shape: tuple[int, int, int]) -> None:
    agree(*sides_of(shape, (torch.bfloat16, torch.bfloat16), torch.float32))
    agree(*sides_of(shape, (torch.float32, torch.float32), torch.float64))


def test_views() -> None:
    sides, scale, layout = sides_of((60, 96, 8), (torch.bfloat16, torch.float32), torch.float64)
    agree(tuple(each[::2] for each in sides), scale, layout)
    agree(tuple(each.t().contiguous().t() for each in sides), scale, layout)
    narrow = TokenLayout(48, 4)
    agree(tuple(each[:, ::2] for each in sides), scale[::2], narrow)
    groups = [torch.tensor([0, 4, 9]), torch.tensor([2])]
    views = tuple(each[:, ::2] for each in sides)
    _apart_agrees(views, scale[::2].contiguous(), groups)


@pytest.mark.parametrize("where", range(3), ids=["candidate", "golden", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(where: int, value: float) -> None:
    sides, scale, layout = sides_of((40, 96, 8), (torch.bfloat16,) * 2, torch.float32)
    sides[where][7, 13] = value
    sides[where][9, 14] = math.inf
    found = agree(sides, scale, layout)
    broken = found.error_tokens if where != 1 else found.products
    assert not torch.isfinite(broken[[7, 9]]).any() and torch.isfinite(broken).sum() == 38


def test_equal_sides_differ_by_nothing() -> None:
    (_, golden, reference), scale, layout = sides_of((40, 96, 8), DTYPES[1:], torch.float32)
    found = agree((golden, golden.clone(), reference), scale, layout)
    assert not found.products.any() and not found.differences.any()
    assert not any(each.p.any() for each in found.slopes.values())


def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, scale, layout = sides_of((1300, 1536, 12), (torch.bfloat16,) * 2, torch.float32)
    monkeypatch.setattr(fused_site, "_TASK", 1 << 16)
    torch.set_num_threads(1)
    alone = fused_site.fused_site_sums(sides, scale, layout)
    torch.set_num_threads(threads)
    shared = fused_site.fused_site_sums(sides, scale, layout)
    for each in fields(SiteSums):
        left, right = getattr(alone, each.name), getattr(shared, each.name)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right), each.name
    assert alone.own == shared.own
    assert all(torch.equal(each, shared.shared[name]) for name, each in alone.shared.items())
    for name, slopes in alone.slopes.items():
        for part in ("p", "q", "pp", "pq", "qq"):
            assert torch.equal(getattr(slopes, part), getattr(shared.slopes[name], part))


def _apart_agrees(sides: Sides, weight: torch.Tensor, groups: list[torch.Tensor]) -> None:
    slope = torch.linspace(-1e-3, 1e-3, len(groups), dtype=torch.float64)
    found = fused_site.fused_apart(sides, weight, groups, slope)
    plain = plain_apart(sides, weight, groups, slope)
    c, g, r = (each.double() for each in sides)
    sizes = [
        (((c - g).abs() + own.abs() * r.abs())[each] * r[each].abs() * weight).sum(0).square().sum()
        for each, own in zip(groups, slope, strict=True)
    ]
    close(found, plain, torch.stack(sizes), "apart")


@pytest.mark.parametrize("wide", WIDER, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 96, 1300])
def test_experts(elements: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    sides, scale, _ = sides_of((50, elements, 0), (dtype, dtype), wide)
    routed = torch.rand(50, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    routed[:, 3] = False
    _apart_agrees(sides, scale.square(), Sent.of(routed).groups(range(6)))


def site(experts: int, dtype: torch.dtype = torch.bfloat16) -> JudgedSite:
    """Return a site large enough to be compiled, of which each token goes to 4 experts."""
    wide = torch.float32 if dtype == torch.bfloat16 else torch.float64
    (candidate, golden, reference), _, layout = sides_of((700, 128, 4), (dtype, dtype), wide)
    mask = torch.rand(700, generator=torch.Generator().manual_seed(3)) < 0.8
    maker = torch.Generator().manual_seed(2)
    ways = {"one": candidate.roll(1, 1), "two": golden}
    floor = measure_floor(ways, golden, reference, mask, layout)
    routed = torch.rand(700, experts, generator=maker).topk(4).indices
    sent = torch.zeros(700, experts, dtype=torch.bool).scatter_(1, routed, value=True)
    return JudgedSite(
        candidate=candidate[mask],
        golden=golden[mask],
        reference=reference[mask],
        tokens=torch.nonzero(mask).flatten(),
        real=int(mask.sum()),
        layout=layout,
        floor=floor,
        clean=CleanSlopes(floor.slopes),
        epsilon=torch.finfo(dtype).eps,
        experts=sent[mask],
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_is_judged_is_the_same_without_numba(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, asked = site(24, dtype), []
    original = site_kernel.measure
    monkeypatch.setattr(site_kernel, "measure", lambda *all: asked.append(1) or original(*all))
    compiled = deviation(given)
    assert asked
    monkeypatch.setattr(site_sums, "find_spec", lambda name: None)
    asked.clear()
    plain = deviation(given)
    assert not asked
    assert compiled.metrics == pytest.approx(plain.metrics, rel=1e-9)
    assert list(compiled.metrics) == list(plain.metrics)
    for name, values in plain.profiles.items():
        np.testing.assert_allclose(compiled.profiles[name], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("slip", [0.0, 3e-4, 5e-2])
@pytest.mark.parametrize("guilty", [range(0), range(5, 6), range(60)], ids=str)
def test_experts_that_are_left_out_do_not_stand_out(
    slip: float, guilty: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = site(60)
    assert given.experts is not None
    hit = given.experts[:, list(guilty)].any(1)
    given.candidate[hit] = (given.candidate[hit].float() * (1 + slip)).bfloat16()
    asked: list[int] = []
    original = site_sums.apart_by_group
    monkeypatch.setattr(
        judged, "apart_by_group", lambda *all: asked.append(len(all[2])) or original(*all)
    )
    found = {}
    for at_once in (1, 8, 60):
        asked.clear()
        monkeypatch.setattr(judged, "_AT_ONCE", at_once)
        found[at_once] = deviation(given).metrics, sum(asked)
    # With one at a time a single expert too few would show.
    assert found[1][1] < found[60][1] == 60
    assert found[1][0] == found[8][0] == found[60][0]


def test_an_expert_that_is_off_in_one_element_hides_none_that_is_off_in_all() -> None:
    given = site(4)
    routed = torch.zeros(given.real, 2, dtype=torch.bool)
    routed[:100, 0] = routed[100:200, 1] = True
    maker = torch.Generator().manual_seed(4)
    golden = torch.randn(given.real, 128, generator=maker).sign().bfloat16()
    candidate = golden.clone()
    # All tokens agree on the first one's slope, and its elements do not.
    candidate[:100, 5] *= 1.5
    candidate[100:200] *= 1 + 0.03 * torch.rand(100, 128, generator=maker).bfloat16()
    given = replace(
        given, candidate=candidate, golden=golden, reference=golden.float(), experts=routed
    )
    given.clean = CleanSlopes()
    found = {}
    for at_once in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judged, "_AT_ONCE", at_once)
            found[at_once] = deviation(given).metrics
    assert found[1] == found[2]
    assert found[1]["slope_expert_index"] == 1
    assert 5 < found[1]["slope_expert_z"] < 1e4


def test_numbers_are_shortened_as_they_are_printed() -> None:
    maker = np.random.default_rng(0)
    usual = maker.normal(size=5000) * 10.0 ** maker.integers(-30, 30, 5000)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 9.99996, 1000, 1e23, 123450, 1e300]
    values = np.array([*usual, *odd])
    for digits in (4, 6):
        printed = [float(f"{each:.{digits}g}") for each in values]
        np.testing.assert_array_equal(shortened(values, digits), printed)
