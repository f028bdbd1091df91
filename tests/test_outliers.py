"""Outliers: weights whose standard deviation is far above, or far below, that of their family."""

from __future__ import annotations

import pytest

from layerparity.checkpoint.outliers import FEWEST, outliers

NAME = "model.layers.{}.mlp.up_proj.weight"
FAMILY = "model.layers.*.mlp.up_proj.weight"


def of_layers(stds: list[float]) -> list[tuple[str, float]]:
    """Return the outliers of one tensor of each layer, with their factors."""
    layers = {layer: {NAME.format(layer): std} for layer, std in enumerate(stds)}
    return [(each.name, each.factor) for each in outliers({FAMILY: layers})]


@pytest.mark.parametrize("factor", [16.0, 1 / 16])
def test_a_weight_out_of_its_family_is_named_whichever_way_it_is_off(factor: float) -> None:
    """As a scale leaves it that was applied twice, or not at all."""
    stds = [0.02, 0.021, 0.019, 0.02, 0.02, 0.02]
    assert of_layers(stds) == []
    stds[4] *= factor
    assert of_layers(stds) == [(NAME.format(4), pytest.approx(16))]


@pytest.mark.parametrize("factor", [1.9, 1 / 1.9])
def test_less_than_twice_is_how_layers_differ(factor: float) -> None:
    assert of_layers([0.02] * 5 + [0.02 * factor]) == []


def test_of_few_weights_none_is_out_of_its_family() -> None:
    assert of_layers([0.02] * (FEWEST - 2) + [2.0]) == []
    assert len(of_layers([0.02] * (FEWEST - 1) + [2.0])) == 1


def test_an_expert_is_held_against_the_others_of_its_layer() -> None:
    experts = {f"model.layers.0.mlp.experts.{n}.w1.weight": 0.02 for n in range(8)}
    experts["model.layers.0.mlp.experts.3.w1.weight"] = 0.001
    (found,) = outliers({"model.layers.*.mlp.experts.*.w1.weight": {0: experts}})
    assert (found.name, found.among) == (
        "model.layers.0.mlp.experts.3.w1.weight",
        "other experts of its layer",
    )
