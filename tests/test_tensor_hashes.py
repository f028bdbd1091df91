"""Tensor hashes: equal for equal values and no others, in whatever pieces they are hashed."""

from __future__ import annotations

import pytest
import torch

from layerparity.model import tensor_hashes
from layerparity.model.tensor_hashes import HashAccount, values_digest

# 1 + 2^-20 is no bfloat16 number, and rounds to 1.
FINE = 1 + 2**-20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_hashes, "_PIECE", 4)


@pytest.mark.parametrize("place", range(12))
def test_a_digit_that_bfloat16_drops_changes_the_hash_wherever_it_stands(place: int) -> None:
    ones = torch.ones(12)
    other = ones.clone()
    other[place] = FINE
    moved = other.roll(1)
    found = [values_digest(each) for each in (ones, other, moved)]
    assert len(set(found)) == 3


def test_the_same_values_have_one_hash_in_any_type() -> None:
    narrow = torch.arange(12).bfloat16()
    found = {values_digest(narrow.to(each)) for each in (torch.bfloat16, torch.float32)}
    assert found == {values_digest(narrow.double())}
    assert values_digest(narrow + 1) not in found


@pytest.mark.parametrize("place", [0, 5, 11])
def test_one_number_that_was_rounded_makes_a_tensor_inexact(place: int) -> None:
    stored = torch.ones(12)
    account = HashAccount.of_cast(torch.float32, torch.bfloat16)
    stored[place] = FINE
    for piece in stored.split(4):
        account.read(piece)
        account.put(piece.bfloat16(), piece)
    assert not account.done().exact
