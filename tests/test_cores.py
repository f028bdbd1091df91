"""Cores: what NxDI's layout costs a Neuron core, and which instance has room for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import pytest

from layerparity.anatomy.family import family_of
from layerparity.anatomy.shards import Heads
from layerparity.anatomy.sizes import ModelSizes
from layerparity.ground.errors import UserError
from layerparity.machine.trainium import INSTANCES, instance_of, smallest_for
from layerparity.plan.core_share import CoreLayout, Surplus, widths_of
from layerparity.plan.deployments import cost_of, degrees_of, deployments
from layerparity.plan.devices import parse_devices
from layerparity.plan.fit import cures, fit_of, problems_of
from layerparity.plan.placement import place
from layerparity.plan.question import Question
from layerparity.plan.weights import PlannedModel, StageWeight, WeightBytes, build

GIB = 2**30
# 6 query heads of 8 channels, 2 KV heads; experts of 16; rows of a vocabulary that nothing divides.
SIZES = ModelSizes(32, 6, 2, 8, 8, 16, 16, 4, 2, 301, (0,))


def weight(name: str, *shape: int) -> StageWeight:
    return StageWeight(name, shape, prod(shape), True)


HELD = (
    weight("embed_tokens.weight", 301, 32),
    weight("layers.0.self_attn.q_proj.weight", 48, 32),
    weight("layers.0.self_attn.q_proj.bias", 48),
    weight("layers.0.self_attn.k_proj.weight", 16, 32),
    weight("layers.0.self_attn.v_proj.weight", 16, 32),
    weight("layers.0.self_attn.o_proj.weight", 32, 48),
    weight("layers.0.input_layernorm.weight", 32),
    weight("layers.0.mlp.gate.weight", 4, 32),
    weight("layers.0.mlp.experts.gate_up_proj", 4, 32, 32),
    weight("lm_head.weight", 301, 32),
)


def test_a_core_holds_its_heads_its_rows_and_what_is_whole() -> None:
    layout = CoreLayout(SIZES, 8)
    held = {w.name: layout.bytes_of([w], "bfloat16").parameters // 2 for w in HELD}
    # 6 query heads become 8, one a core; each KV head is on 4 cores; 301 rows become 304.
    assert held["layers.0.self_attn.q_proj.weight"] == 8 * 32
    assert held["layers.0.self_attn.q_proj.bias"] == 8
    assert held["layers.0.self_attn.k_proj.weight"] == 8 * 32
    assert held["layers.0.self_attn.o_proj.weight"] == 32 * 8
    assert held["layers.0.input_layernorm.weight"] == 32
    assert held["layers.0.mlp.gate.weight"] == 4 * 32
    assert held["layers.0.mlp.experts.gate_up_proj"] == 4 * 32 * 32 // 8
    assert held["lm_head.weight"] == 304 // 8 * 32
    assert held["embed_tokens.weight"] == 301 * 32 // 8
    assert layout.cache_part() == Fraction(1, 2)
    assert CoreLayout(SIZES, 5).width == 35


def test_causes_add_up_to_what_a_core_holds() -> None:
    layout = CoreLayout(SIZES, 8)
    added = layout.added(HELD, "float32")
    even = sum(w.bytes("float32") for w in HELD) / 8
    assert set(added) == {Surplus.query, Surplus.kv, Surplus.vocabulary, Surplus.whole}
    assert abs(layout.bytes_of(HELD, "float32").all - even - sum(added.values())) < len(HELD) + 4
    assert added[Surplus.query] == (2 * 8 * 32 * 2 + 2 * 8) * 4 // 8
    assert added[Surplus.kv] == 6 * 8 * 32 * 2 * 4 // 8
    assert CoreLayout(SIZES, 1).added(HELD, "float32") == {}
    assert CoreLayout(SIZES, 1).bytes_of(HELD, "bfloat16") == WeightBytes(
        sum(w.bytes("bfloat16") for w in HELD), 0
    )


def test_a_fused_projection_pays_for_both_kinds_of_heads() -> None:
    fused = weight("layers.0.self_attn.qkv_proj.weight", 80, 32)
    apart = [w for w in HELD if w.name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")]
    apart = [w for w in apart if w.name.endswith("weight")]
    layout = CoreLayout(SIZES, 8)
    assert layout.bytes_of([fused], "bfloat16") == layout.bytes_of(apart, "bfloat16")
    assert layout.added([fused], "bfloat16") == layout.added(apart, "bfloat16")


def test_only_widths_that_a_weight_has_must_divide() -> None:
    widths = widths_of(SIZES, HELD)
    assert (widths.dense, widths.expert, widths.experts) == (0, 16, 4)
    router = weight("layers.0.mlp.gate.weight", 4, 16)
    assert widths_of(SIZES, [*HELD, router]).dense == 0, "a router is no MLP, however wide"
    dense = weight("layers.0.mlp.up_proj.weight", 16, 32)
    assert widths_of(SIZES, [dense]).dense == 16
    assert widths_of(SIZES, HELD[:7]).misfits(5, 1) == []


@pytest.fixture(scope="module")
def real() -> PlannedModel:
    from omegaconf import OmegaConf

    from layerparity.ground.resources import shipped

    read: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "model/minimax_m2.yaml"))
    names = ["embed_tokens", *(f"layers.{n}" for n in range(62)), "norm", "lm_head"]
    return build(read["architecture"], family_of("minimax_m2"), names, None, None)


@pytest.fixture
def ask(real: PlannedModel) -> Callable[..., Question]:
    def made(degree: int, devices: str = "trn2.48xlarge", **changes: Any) -> Question:
        found = parse_devices(devices, changes.pop("lnc", None))
        usual = Question(real, found, "auto", None, "bfloat16", 1, 2048)
        return replace(usual, one_device=True, degree=degree, nxdi=True, **changes)

    return made


def test_minimax_m2_at_64_pays_for_16_heads_of_zeros_and_56_repeated_ones(ask: Any) -> None:
    cost = cost_of(ask(64))
    one = 128 * 3072 * 2 * 62
    # A sixty-fourth of 16 heads in q and o, and of 56 in k and v.
    assert cost.added[Surplus.query] == 16 * 2 * one // 64
    assert cost.added[Surplus.kv] == 56 * 2 * one // 64
    assert cost.even == (457_379_497_984 + 62 * 256 * 4) // 64
    # A core has a KV head of its own, eight times an even part.
    assert cost.even_cache + cost.added_cache == 8 * cost.even_cache == 2 * 128 * 2048 * 2 * 62
    even = cost_of(ask(8))
    assert (set(even.added), even.added_cache) == ({Surplus.whole}, 0)


def test_expert_groups_cost_a_core_the_same(ask: Any) -> None:
    apart, wide = ask(64, ep=8), ask(64)
    assert apart.weights == wide.weights
    assert 1024 in degrees_of(ask(8, ep=2))
    assert 1024 not in degrees_of(wide)


def test_a_degree_that_the_loader_refuses_is_not_proposed(ask: Any) -> None:
    assert degrees_of(ask(64))[:8] == [1, 2, 4, 8, 16, 24, 32, 48]
    assert Heads(48, 8, 12).converts
    assert not any(Heads(48, 8, degree).converts for degree in (1, 4, 8, 64))
    # Where each query head has its own KV head, there is no group to convert.
    assert not Heads(40, 40, 32).converts


def test_instances_by_lnc(ask: Any) -> None:
    question = ask(64)
    rows = {(r.instance.name, r.lnc): r for r in deployments(question, degrees_of(question))}
    assert {name for name, _ in rows} == {
        "trn1.32xlarge",
        "trn2.48xlarge",
        "trn2-ultraserver",
        *(f"trn3-gen{gen}{size}" for gen in (1, 2) for size in ("", "-ultraserver")),
    }
    usual, single = rows["trn2.48xlarge", 2], rows["trn2.48xlarge", 1]
    assert (usual.cores, usual.each, usual.fits, usual.smallest) == (64, 24 * GIB, True, 24)
    assert (single.cores, single.each, single.smallest) == (128, 12 * GIB, 48)
    assert usual.needed == place(question).shares[0].capacity - place(question).shares[0].headroom
    old = rows["trn1.32xlarge", 1]
    assert (old.cores, old.each, old.fits, old.smallest) == (32, 16 * GIB, False, 32)
    assert ("trn1.32xlarge", 2) not in rows
    assert not rows["trn3-gen2", 2].fits, "16 cores are not 64, however large"
    assert rows["trn3-gen1-ultraserver", 2].each == 36 * GIB


def test_instances_are_as_large_as_documented() -> None:
    total = {each.name: each.chips * each.each for each in INSTANCES}
    assert total["trn1.32xlarge"] == 512 * GIB
    assert total["trn2.48xlarge"] == total["trn2u.48xlarge"] == 1536 * GIB
    assert total["trn2-ultraserver"] == 6144 * GIB
    assert total["trn3-gen1-ultraserver"] == 9216 * GIB
    for each in INSTANCES:
        for lnc in each.lncs:
            assert each.logical_cores(lnc) * each.core_bytes(lnc) == total[each.name]
    assert smallest_for(64) == instance_of("trn2.48xlarge")
    assert smallest_for(65) == instance_of("TRN2-ultraserver ")
    assert smallest_for(65, 1) == instance_of("trn2.48xlarge")
    assert smallest_for(257) == instance_of("trn3-gen2-ultraserver")
    assert smallest_for(2000) is None
    with pytest.raises(UserError, match=r"trn1\.32xlarge has no LNC 2: use plan\.lnc=1\."):
        parse_devices("trn1.32xlarge", 2)


def test_what_does_not_fit_says_a_degree_that_does(ask: Any) -> None:
    question = ask(8)
    assert not place(question).fits
    assert cures(question)[0] == "tp_degree=24"
    assert place(replace(question, degree=24)).fits
    # 32 cores of 16 GiB hold no float32 at any degree.
    assert cures(ask(32, "trn1.32xlarge", dtype="float32"))[0] == "dtype=bfloat16"
    small = ask(4, "4x16GiB")
    assert cures(small)[0] == "plan.devices=trn1.32xlarge tp_degree=32"


@pytest.mark.parametrize(
    ("degree", "ep", "says"),
    [
        (64, 1, None),
        (12, 1, None),
        (5, 1, "tp_degree=5 does not divide 1536 (intermediate size of an expert), which NxDI does not pad. Cure: tp_degree=4 or tp_degree=8."),  # noqa: E501
        (48, 12, "moe_ep_degree=12 does not divide 256 (experts), which NxDI does not pad. Cure: moe_ep_degree=4."),  # noqa: E501
        (40, 4, "moe_tp_degree=10 does not divide 1536 (intermediate size of an expert), which NxDI does not pad. Cure: tp_degree=32 or tp_degree=48 with moe_ep_degree=4."),  # noqa: E501
    ],
)  # fmt: skip
def test_only_what_nxdi_does_not_pad_is_refused(
    ask: Any, degree: int, ep: int, says: str | None
) -> None:
    found = problems_of(fit_of(ask(degree, "trn3-gen1-ultraserver", ep=ep), degree))
    assert [each for each in found if "divide" in each] == ([says] if says else [])
