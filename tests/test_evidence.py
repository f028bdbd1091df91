"""What numbers, replays and weights prove of a cause, and what they leave open."""

from __future__ import annotations

import pytest
import torch
from bisections import evidence

from layerparity.mistakes.fault import Fault
from layerparity.mistakes.measured import share
from layerparity.mistakes.replayed import Replayed
from layerparity.mistakes.ruled_out import ruled_out
from layerparity.mistakes.shape import outliers, trend
from layerparity.mistakes.values import Values, best_factor, same
from layerparity.record.weights import Fate, WeightFinding

TOKENS, WIDTH, STEP = 32, 8, 2**-8


def golden() -> torch.Tensor:
    maker = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, WIDTH, generator=maker, dtype=torch.float64)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_differs_is_told_whatever_its_sign(sign: float) -> None:
    assert outliers([0.0, 0.1 * sign, -0.2, sign, 0.5 * sign]) == [3, 4]
    assert outliers([sign] * 3) == [0, 1, 2]
    assert outliers([0.0, 0.0]) == []
    assert trend([sign * at for at in (1, 2, 3, 4)], range(4)) == pytest.approx(sign)


def test_a_hypothesis_has_to_give_every_token() -> None:
    """One token that it misses is drowned by all the others, and is no rounding."""
    right = golden()
    limit = Values(right, right, STEP).limit
    near = right * (1 + 0.5 * limit)
    assert same(right, near, limit)
    for off, shown in ((2, True), (5, False)):
        one = right.clone()
        one[7] *= 1 + off * limit
        assert float((one - right).norm() / right.norm()) < limit, "all together it is rounding"
        assert same(right, one, limit) is shown
    assert not same(right[:3], right[:3], limit), "three tokens are fitted by anything"


def test_a_hypothesis_is_shown_where_it_explains_the_error_and_the_golden_does_not() -> None:
    right = golden()
    scaled = Values(right, 1.1 * right, STEP)
    assert best_factor(right, 1.1 * right) == pytest.approx(1.1)
    assert scaled.shows(1.1 * right) and not scaled.shows(right)
    assert scaled.is_golden(right) and not scaled.is_golden(1.1 * right)
    rounded = Values(right, right * (1 + STEP / 4), STEP)
    assert not rounded.shows(right), "of rounding nothing is left to explain"


def test_few_cases_of_a_rule_do_not_make_it_certain() -> None:
    known = {"often": {"signs": (96, 72)}, "once": {"signs": (1, 1)}, "never": {"hints": (9, 0)}}
    pooled = (1 + 73) / (2 + 97)
    assert share(known, "once", "signs") == pytest.approx((1 + 4 * pooled) / 5)
    assert share(known, "often", "signs") == pytest.approx((72 + 4 * pooled) / 100)
    assert share(known, "new", "signs") == pytest.approx(pooled)
    assert share(known, "never", "hints") == pytest.approx(4 * (1 / 11) / 13)
    assert share(known, "new", "shown") == pytest.approx(0.5)


def test_weights_are_ruled_out_only_where_both_ports_told_them() -> None:
    where = ("mlp.experts", "mlp.experts:out")
    assert ruled_out(evidence(*where)) == ()
    assert ruled_out(evidence(*where, weights_compared=True)) == (
        "a weight that is not the checkpoint's",
    )
    wrong = WeightFinding("w", "layers.3", 3, "mlp.experts", "swapped", Fate.NOT_GOLDEN)
    assert ruled_out(evidence(*where, weights_compared=True, findings=[wrong])) == ()


@pytest.mark.parametrize(
    ("ranks", "degree", "told"),
    [
        ([2], 4, (2,)),
        ([None], 4, (0, 1, 2, 3)),
        ([2, 2], 4, (2,)),
        ([1, 2], 4, ()),
        ([None, 2], 4, ()),
        ([2], 8, ()),
        ([], 4, ()),
    ],
)
def test_a_rank_is_told_where_it_alone_gives_the_numbers(
    ranks: list[int | None], degree: int, told: tuple[int, ...]
) -> None:
    shown = tuple(
        Fault(f"fault {n}", "a sum", "mlp", "experts_not_reduced", degree=4, rank=rank)
        for n, rank in enumerate(ranks)
    )
    assert Replayed(shown).ranks(degree) == told
