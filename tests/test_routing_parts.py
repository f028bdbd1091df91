"""The parts of a squared error that other experts and other weights of them explain, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import make_run, sites

from layerparity.judge.routing_share import (
    EVERYTHING,
    IDS,
    NATURAL,
    RoutingShare,
    routing_shares,
)
from layerparity.judge.sides import RunSet, open_side

END = "layers.1:out"
EXPERTS = {0: 4, 1: 4}
MASK = torch.tensor([[False, True, True, True, True], [True] * 5])


def side(folder: Path, error: float, moved: int = 0) -> RunSet:
    """Return a run whose block's output is off by a part of itself, some tokens routed apart."""
    tensors = sites()
    tensors[END] = tensors[END] * (1 + error)
    choices = tensors["layers.1.mlp.gate:choices"].clone()
    choices.view(-1, 2)[:moved] = torch.tensor([1, 3])
    tensors["layers.1.mlp.gate:choices"] = choices
    run = make_run(folder, tensors, mask=MASK, layer_experts=EXPERTS)
    return open_side("candidate", [run])


@pytest.fixture
def shares(tmp_path: Path) -> dict[str, RoutingShare]:
    golden = side(tmp_path / "golden", 0.0)
    errors = {NATURAL: (0.5, 3), IDS: (0.3, 0), EVERYTHING: (0.1, 0)}
    runs = {name: side(tmp_path / name, *each) for name, each in errors.items()}
    return {str(each.site): each for each in routing_shares(golden, runs)}


def test_each_run_explains_what_the_square_of_its_error_lacks(
    shares: dict[str, RoutingShare],
) -> None:
    found = shares[END]
    assert found.errors == pytest.approx({NATURAL: 0.5, IDS: 0.3, EVERYTHING: 0.1})
    assert found.by_ids == pytest.approx((0.25 - 0.09) / 0.25)
    assert found.by_weights == pytest.approx((0.09 - 0.01) / 0.25)
    clean = shares["layers.0:out"]
    assert (clean.errors[NATURAL], clean.by_ids, clean.by_weights) == (0.0, None, None)


def test_padding_is_routed_nowhere(shares: dict[str, RoutingShare]) -> None:
    # Of three tokens that were moved the first is padding.
    assert (shares[END].tokens, shares[END].apart) == (9, 2)
    assert (shares["layers.0:out"].apart, shares["lm_head:out"].apart) == (0, 0)
    assert shares["lm_head:out"].kl == pytest.approx(dict.fromkeys((NATURAL, IDS, EVERYTHING), 0.0))
    assert shares[END].kl == {}
