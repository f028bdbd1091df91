"""One share of a split model, planned for devices that are not alike: the smallest decides."""

from __future__ import annotations

from typing import Any

import pytest

from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError
from layerparity.plan.devices import parse_devices
from layerparity.plan.placement import place
from layerparity.plan.question import Question
from layerparity.plan.weights import PlannedModel, StageWeight

GB = 10**9
SIZES = sizes_of(
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "num_hidden_layers": 1,
    }
)


def question(devices: str, **changes: Any) -> Question:
    """Return a question of a model of one matrix of 100 GB, over two devices."""
    matrix = StageWeight("layers.0.w", (50_000, 1_000_000), 50 * GB, True)
    weights = {"layers.0": (matrix,)}
    model = PlannedModel(weights, SIZES, frozenset(), frozenset(weights), "sdpa", "eager")
    way = {"one_device": True, "degree": 2, "gpus": True, **changes}
    return Question(model, parse_devices(devices), "auto", None, "bfloat16", 1, 16, **way)


@pytest.mark.parametrize("devices", ["80GB,40GB", "40GB,80GB", "40GB,80GB,20GB"])
def test_each_device_holds_as_much_as_the_smallest_of_them(devices: str) -> None:
    (share,) = place(question(devices)).shares
    assert (share.device, share.copies) == ("each of cuda:0..1", 2)
    assert share.weights == 50 * GB
    assert share.capacity == 40 * GB
    assert not share.fits


def test_a_share_fits_where_it_fits_the_smallest() -> None:
    assert place(question("60GB,80GB")).fits
    assert place(question("80GB,60GB")).fits
    assert not place(question("80GB,49GB")).fits


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(UserError, match="tp_degree=2 wants as many devices, and there are 1"):
        place(question("80GB"))
