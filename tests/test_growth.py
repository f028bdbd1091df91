"""Growth: an error in a chain is held against what rounding has grown to there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from bisections import compared, row, site

from layerparity.judge.growth import FACTOR, ChainJudgement, judge_chained
from layerparity.record.verdict import Outcome, Row

STEP = 4 * 2**-23


def chain(*errors: Sequence[float], rows: Sequence[Row] = ()) -> ChainJudgement:
    """Judge a chain of blocks whose outputs have these errors by token, and a floor at the first.

    It is in float32; ``rows`` take the place of those of the blocks' outputs.
    """
    outputs = [site(layer, ":out") for layer in range(len(errors))]
    floors = [{"floor_rel_l2": 1e-3}] + [{}] * (len(errors) - 1)
    usual = [row(each, **floor) for each, floor in zip(outputs, floors, strict=True)]
    found = {str(each): list(own) for each, own in zip(outputs, errors, strict=True)}
    verdict = compared([*(rows or usual)], feed="chained", token_errors=found)
    return judge_chained(verdict, len(errors) - 1, 0)


def test_a_block_of_nan_is_wrong() -> None:
    found = chain([1e-4] * 3, [math.nan] * 3)
    assert (found.wrong, found.layer) == (True, 1)
    assert math.isnan(found.error)


def test_half_of_the_tokens_decide_and_a_flip_does_not() -> None:
    assert not chain([1e-4, 1e-4, 0.5]).wrong
    assert chain([1e-4, 0.5, 0.5]).wrong


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_past_a_measured_floor_the_steps_of_each_block_add_up_in_squares(times: float) -> None:
    grown = math.hypot(1e-3, math.sqrt(2) * STEP)
    found = chain([1e-4], [1e-4], [times * FACTOR * grown])
    assert found.wrong is (times > 1)
    assert found.allowed == pytest.approx(FACTOR * grown, rel=1e-12)


def test_a_block_that_lost_what_it_adds_is_not_called_right() -> None:
    lost = [row(site(0, ":out")), row(site(1, ":out"), Outcome.MISSING)]
    found = chain([1e-9], [], rows=lost)
    assert not found.wrong
    assert [(each.layer, each.row) for each in found.untold] == [(1, lost[1])]
