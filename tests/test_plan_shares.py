"""What a plan counts of a model made by hand: a device's share, keys to come, cores enough."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from layerparity.anatomy.sizes import ModelSizes
from layerparity.ground.errors import UserError
from layerparity.plan.deployments import deployments
from layerparity.plan.devices import parse_devices
from layerparity.plan.placement import place
from layerparity.plan.question import Question
from layerparity.plan.weights import PlannedModel, StageWeight, bytes_of

GB, GIB = 10**9, 2**30
HIDDEN, LAYERS, VOCABULARY = 4096, 8, 32_000
# 64 heads of 64 channels, 8 KV heads.
SIZES = ModelSizes(HIDDEN, 64, 8, 64, 64, 2**14, 2**14, 0, 0, VOCABULARY, (0,) * LAYERS)
STAGES = ("embed_tokens", *(f"layers.{n}" for n in range(LAYERS)), "norm", "lm_head")
DEGREES = [1, 2, 4, 8, 16, 32, 64]


def weight(name: str, *shape: int) -> StageWeight:
    return StageWeight(name, shape, prod(shape), True)


def model(rows: int) -> PlannedModel:
    """Return a model of whose blocks each holds a matrix of so many rows, and a norm."""
    weights = {stage: (weight(f"{stage}.norm.weight", HIDDEN),) for stage in STAGES}
    for stage in STAGES[1:-2]:
        weights[stage] += (weight(f"{stage}.mlp.down_proj.weight", rows, HIDDEN),)
    return PlannedModel(weights, SIZES, frozenset(), frozenset(), "sdpa", "eager")


def ask(devices: str, rows: int = 1 << 17, **changes: Any) -> Question:
    """Ask whether a model fits; of 2^17 rows, each block is a GiB in bfloat16."""
    usual = Question(model(rows), parse_devices(devices), "auto", None, "bfloat16", 1, 128)
    return replace(usual, **{"one_device": True, "gpus": True, **changes})


@pytest.mark.parametrize("devices", ["1x3GiB,1x80GiB", "1x80GiB,1x3GiB"])
def test_of_devices_that_share_a_stage_the_smallest_decides(devices: str) -> None:
    (share,) = place(ask(devices, degree=2)).shares
    assert (share.device, share.copies, share.capacity) == ("each of cuda:0..1", 2, 3 * GIB)
    assert 4 * GIB < share.weights < 4.01 * GIB
    assert not share.fits
    assert place(ask(devices.replace("3GiB", "6GiB"), degree=2)).fits
    # What is beyond the degree holds nothing.
    assert place(ask("2x80GiB,1x1GiB", degree=2)).fits
    with pytest.raises(UserError, match="tp_degree=3 wants as many devices, and there are 2"):
        place(ask(devices, degree=3))


def test_vectors_are_whole_on_every_device_and_parts_are_rounded_up() -> None:
    vector, matrix = weight("norm.weight", 7), weight("mlp.weight", 7, 1)
    assert [bytes_of([each], "bfloat16", 4).all for each in (vector, matrix)] == [14, 4]


def test_the_keys_of_tokens_to_come_are_counted() -> None:
    short = ask("1x80GiB", new_tokens=0)
    long = replace(short, new_tokens=2**20)
    one = 2 * 8 * 64 * 2 * LAYERS
    assert sum(short.cache.values()) == 128 * one
    assert sum(long.cache.values()) == (128 + 2**20) * one
    (share,) = place(long).shares
    assert share.cache == sum(long.cache.values())
    assert place(ask("1x12GiB", new_tokens=0)).fits
    assert not place(ask("1x12GiB", new_tokens=2**20)).fits


def test_an_instance_is_advised_with_no_more_ranks_than_cores() -> None:
    """Of 900 GiB a rank of 32 would have room on a core, and there are 16 cores."""
    question = ask("trn2.48xlarge", 900 << 14, nxdi=True, gpus=False, degree=64)
    found = {(row.instance.name, row.lnc): row for row in deployments(question, DEGREES)}
    few, many = found["trn3-gen2", 2], found["trn3-gen1", 2]
    assert (few.cores, few.each, few.smallest, few.fits) == (16, 36 * GIB, None, False)
    assert (many.cores, many.each, many.smallest, many.fits) == (64, 36 * GIB, 32, True)
    assert few.headroom == many.headroom > 0
