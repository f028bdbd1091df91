"""Deviations: what a floor that few tokens show is worth."""

from __future__ import annotations

import pytest
import torch

from layerparity.numbers.chance import of_few


def test_the_floor_of_few_tokens_is_raised_by_the_square_of_what_one_more_adds() -> None:
    assert of_few(1.0) == 4
    assert of_few(torch.tensor([2.0, 1e9])).tolist() == [2.25, pytest.approx(1)]
