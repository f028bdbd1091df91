"""Sites of one token each, judged together, against each judged by itself."""

from __future__ import annotations

import math

import pytest
import torch

from layerparity.numbers.clean_slopes import CleanSlopes, SlopeSample
from layerparity.numbers.deviation import Deviation, JudgedSite, deviation
from layerparity.numbers.floor import Floor
from layerparity.numbers.one_token import OneTokenSites, deviations
from layerparity.numbers.token_sums import TokenLayout
from layerparity.numbers.typical_floor import TypicalFloor

SITES, WIDTH, WAYS = 7, 24, 3
TYPICAL = [None, TypicalFloor(1e-6, 1e-7, 5.0), TypicalFloor(1e-4, 1e-3, math.inf)]
CLEAN = CleanSlopes({"whole": SlopeSample(0.1, 3), "channel": SlopeSample(0.2, 3)})


def made(
    heads: int, typical: TypicalFloor | None, dtype: torch.dtype, experts: int
) -> OneTokenSites:
    """Return sites of random numbers: one a zero, one without a floor, one equal, one far off.

    Each token is sent to at least one of the ``experts``, if there are any.
    """
    maker = torch.Generator().manual_seed(heads)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=maker, dtype=torch.float64)

    reference = drawn(SITES, WIDTH)
    reference[0] = 0
    reference[1, : WIDTH // 2] = 0
    golden = (reference + 1e-3 * drawn(SITES, WIDTH)).to(dtype)
    candidate = (reference + 1e-3 * drawn(SITES, WIDTH)).to(dtype)
    candidate[3] = golden[3]
    candidate[4] *= 1.5
    elements = 1e-6 * drawn(SITES, WAYS, WIDTH).square()
    elements[2] = 0
    epsilon = torch.finfo(dtype).eps
    layout = TokenLayout(WIDTH, heads)
    sent = drawn(SITES, experts) > 0 if experts else None
    if sent is not None:
        sent[:, -1] |= ~sent.any(1)
    return OneTokenSites(
        candidate, golden, reference, elements.sum(2), elements, layout, epsilon, typical, sent
    )


def alone(sites: OneTokenSites, index: int) -> Deviation:
    """Return one of the sites as it is judged by itself."""
    row = slice(index, index + 1)
    floor = Floor(("a", "b", "c"), sites.tokens[index].unsqueeze(1), sites.elements[index])
    return deviation(
        JudgedSite(
            sites.candidate[row],
            sites.golden[row],
            sites.reference[row],
            torch.zeros(1, dtype=torch.int64),
            1,
            sites.layout,
            floor,
            CLEAN,
            sites.epsilon,
            experts=None if sites.experts is None else sites.experts[row],
            typical=sites.typical,
        )
    )


@pytest.mark.parametrize("experts", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("typical", TYPICAL, ids=["none", "narrow", "wide"])
def test_sites_judged_together_are_judged_as_each_by_itself(
    heads: int, typical: TypicalFloor | None, dtype: torch.dtype, experts: int
) -> None:
    sites = made(heads, typical, dtype, experts)
    found = deviations(sites)
    assert len(found) == SITES
    for index, together in enumerate(found):
        expected = alone(sites, index)
        assert list(together.metrics) == list(expected.metrics)
        assert together.metrics == pytest.approx(expected.metrics, rel=1e-12, abs=1e-300)
        assert list(together.profiles) == list(expected.profiles)
        for name, profile in together.profiles.items():
            assert profile == pytest.approx(expected.profiles[name], rel=1e-12, abs=1e-300)
    # They do differ: what is compared is no row of zeros.
    ratios = [each.metrics["error_ratio"] for each in found]
    assert len(set(ratios)) == SITES and max(ratios) > 2 * min(ratios)
